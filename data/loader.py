"""Training and validation batches as pure functions of (seed, step, sequence index).

The shards of a split are joined. An epoch cuts them into windows of seq_len + 1 tokens with stride
seq_len, from an offset of its own, and visits every window once, in a keyed random order that needs
no memory. Sequence i of step s is number s * global_batch_size + i of the run, whoever computes it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from data.shards import DamagedShard
from data.windows import Windows


class JoinedShards:
    """Shards (uint16, 1-D each) as one array. DamagedShard: what is read is beyond vocab_size."""

    def __init__(self, shards: list[np.ndarray], vocab_size: int = 2**16):
        self.names = [getattr(part, "filename", f"shard {i}") for i, part in enumerate(shards)]
        self.shards = [np.asarray(shard) for shard in shards]  # slicing a memmap object is slow
        self.starts = np.concatenate([[0], np.cumsum([len(shard) for shard in shards])])
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """count tokens from each of `starts`, uint16 (len(starts), count); zeros past the end."""
        tokens = np.zeros((len(starts), count), dtype=np.uint16)
        shards = np.searchsorted(self.starts, starts, side="right") - 1
        for row, start, shard in zip(tokens, starts.tolist(), shards.tolist()):
            filled = 0
            while filled < count and shard < len(self.shards):
                begin = start + filled - int(self.starts[shard])
                part = self.shards[shard][begin : begin + count - filled]
                row[filled : filled + len(part)] = part
                filled, shard = filled + len(part), shard + 1
        # An id beyond the embedding would be a CUDA assertion without a name.
        if tokens.size and tokens.max() >= self.vocab_size:
            row, column = np.argwhere(tokens >= self.vocab_size)[0].tolist()
            position = int(starts[row]) + column
            shard = int(np.searchsorted(self.starts, position, side="right")) - 1
            found = f"token id {tokens[row, column]} at {position - self.starts[shard]}"
            beyond = f"{self.names[shard]} holds {found}, its vocabulary has {self.vocab_size}"
            raise DamagedShard(f"{beyond}: it is damaged, or its meta.json is another corpus's")
        return tokens


def keyed_permutation(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """A bijection of 0..size-1 that depends on key: a four-round Feistel network, which permutes a
    power of four, walked on until it lands below size.
    """
    half_bits = max(((size - 1).bit_length() + 1) // 2, 1)
    mask = np.uint64((1 << half_bits) - 1)
    round_keys = np.random.Generator(np.random.PCG64(key)).integers(0, 2**64, 4, dtype=np.uint64)

    def encrypt(x):
        left, right = x >> np.uint64(half_bits), x & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << np.uint64(half_bits)) | right

    # At most three in four values lie outside, so that few rounds are needed.
    result = encrypt(index.astype(np.uint64))
    while (outside := result >= size).any():
        result[outside] = encrypt(result[outside])
    return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit reaches every output bit. uint64 wraps."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Batches:
    """One split in windows; `documents`, of a corpus whose documents have one length: each is one.

    ValueError: their length is not that of seq_len, or no window fits.
    """

    split: str

    def __init__(self, shards, seq_len: int, vocab_size=2**16, documents: Windows | None = None):
        self.tokens, self.seq_len = JoinedShards(shards, vocab_size), seq_len
        self.documents = documents
        if documents and seq_len != documents.length:
            have = f"the documents of this corpus have {documents.tokens} tokens each, one a window"
            raise ValueError(f"block_size={seq_len}: {have}: give --block_size={documents.length}")
        # The last target of a window is the first id of the next, where it is no document.
        self.overlap = 0 if documents else 1
        self.stride = documents.tokens if documents else seq_len
        self.whole = (len(self.tokens) - self.overlap) // self.stride  # windows
        if self.whole < 1 and (documents or self.split == "training"):
            has = f"the {self.split} split has {len(self.tokens)} tokens"
            needs = f"block_size={self.seq_len} needs {self.stride + self.overlap} or more"
            raise ValueError(f"{has}, {needs}")

    def read(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and targets, int64 (len(starts), seq_len), of the windows that begin there."""
        tokens = self.tokens.read(starts, self.stride + self.overlap)
        if self.documents:
            return self.documents.ids_and_targets(tokens)
        ids, targets = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
        return torch.from_numpy(ids), torch.from_numpy(targets)


class TrainBatches(Batches):
    """Random windows of the training split. ValueError: it is shorter than one window."""

    split = "training"

    def __init__(self, shards, seq_len: int, global_batch_size: int, seed: int, *rest, **keys):
        super().__init__(shards, seq_len, *rest, **keys)
        self.global_batch_size, self.seed = global_batch_size, seed
        # Where documents have any length, one window fewer than fit at offset 0, so that every
        # offset up to a window and the tail holds as many.
        self.windows = self.whole if self.documents else max(self.whole - 1, 1)
        self.skipped = len(self.tokens) - self.overlap - self.windows * self.stride  # per epoch
        self.max_offset = 0 if self.documents else self.skipped

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """First tokens of the sequences `numbers` of the run, int64."""
        epochs, indices = np.divmod(numbers, self.windows)
        starts = np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            here, draw = epochs == epoch, np.random.Generator(np.random.PCG64([self.seed, epoch]))
            # With an offset of its own, each epoch cuts the text at other places.
            offset = draw.integers(0, self.max_offset + 1)
            [key] = np.random.SeedSequence([self.seed, epoch, 1]).generate_state(1, np.uint64)
            windows = keyed_permutation(indices[here], self.windows, int(key))
            starts[here] = offset + windows * self.stride
        return starts

    def get(self, step: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and targets, int64 (count, seq_len), of sequences first.. of the batch of `step`."""
        begin = step * self.global_batch_size + first
        return self.read(self.starts(np.arange(begin, begin + count)))

    def shares(self, step: int, rows: int) -> torch.Tensor | None:
        """What the loss of each micro-batch of `rows` sequences counts in the batch of `step`.

        float32 (global_batch_size / rows,): its targets over the mean number of them, so that the
        mean of loss times share is the mean over all targets; all zero in a batch without any.
        None: all count the same, as they do wherever targets are the next tokens. (A stream's extra
        loss, which knows no targets, is weighted with the rest.)
        """
        if not (self.documents and self.documents.labels):
            return None
        _, targets = self.get(step, 0, self.global_batch_size)
        counts = (targets != -1).view(-1, rows * self.seq_len).sum(1)
        if counts[0] > 0 and (counts == counts[0]).all():
            return None
        return (counts / counts.double().mean().clamp_min(1e-9)).float()


def has_targets(tokens: JoinedShards, documents: Windows, windows: Sequence[int]) -> bool:
    """Whether one of these documents has a target; reading ends with the first that have."""
    for first in range(0, len(windows), 256):
        starts = np.array(windows[first : first + 256], dtype=np.int64) * documents.tokens
        _, targets = documents.ids_and_targets(tokens.read(starts, documents.tokens))
        if (targets != -1).any():
            return True
    return False


class ValidationBatches(Batches):
    """The validation split in order: window w predicts tokens w*seq_len+1 .. (w+1)*seq_len, the
    last one what is left.

    Every token but the first is a target exactly once. `scored`: bool (seq_len,), or None.
    ValueError: fewer than two tokens.
    """

    split = "validation"

    def __init__(self, *arguments, **keys):
        super().__init__(*arguments, **keys)
        tokens, documents = len(self.tokens), self.documents
        if tokens < 2:
            raise ValueError(f"the validation split has {tokens} tokens, it needs 2 or more")
        self.windows = self.whole if documents else -(-(tokens - 1) // self.seq_len)
        has_scored = documents and documents.scored
        self.scored = documents.mask(documents.scored) if has_scored else None

    def spread(self, count: int | None = None, part: str = "all") -> list[int]:
        """`count` windows, or all, evenly over the split, or over its first or second half."""
        half = self.windows // 2
        first = half if part == "second" else 0
        end = half if part == "first" else self.windows
        count = end - first if count is None else min(count, end - first)
        return sorted(set(np.linspace(first, end - 1, count).round().astype(int).tolist()))

    def get(self, windows: list[int], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and targets, int64 (rows, seq_len); 0 and -1 in rows and positions past the end."""
        starts = np.full(rows, len(self.tokens))  # of no window: past the end
        starts[: len(windows)] = np.array(windows, dtype=np.int64) * self.stride
        ids, targets = self.read(starts)
        left = torch.from_numpy(len(self.tokens) - 1 - starts)
        # The last window is shorter, and a batch of the last ones has empty rows.
        past = torch.arange(self.seq_len) >= left[:, None]
        return ids.masked_fill_(past, 0), targets.masked_fill_(past, -1)


def prefetched(
    make: Callable, requests: Iterable, device: torch.device, ahead: int = 2
) -> Iterator:
    """`make(request)`, tensors, for each request in order, on `device`; a thread works `ahead`."""
    cuda, requests = device.type == "cuda", iter(requests)

    def work(request):
        # Pinned memory is copied to a GPU while the program goes on.
        return tuple(tensor.pin_memory() for tensor in make(request)) if cuda else make(request)

    keys = {"initializer": torch.cuda.set_device, "initargs": (device,)} if cuda else {}
    with ThreadPoolExecutor(1, **keys) as pool:
        pending = deque()
        while True:
            while len(pending) < ahead and (request := next(requests, None)) is not None:
                pending.append(pool.submit(work, request))
            if not pending:
                return
            ready = pending.popleft().result()
            yield tuple(tensor.to(device, non_blocking=True) for tensor in ready)
