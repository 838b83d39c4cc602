"""Training and validation batches as pure functions of (seed, step, sequence index).

The shards of a split are joined into one stream of tokens. An epoch cuts the stream into sequences
of seq_len + 1 tokens with stride seq_len, from a random offset, and visits each of them once in a
random order that needs no memory. Sequence i of the batch of step s has number
s * global_batch_size + i in the run, whichever rank computes it.

Documents are joined without a boundary in attention: a token attends to earlier documents of its
sequence, as in nanoGPT and llm.c.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from data.sequences import IGNORED_TARGET, SequenceLayout
from data.shards import DamagedShard

Request = TypeVar("Request")
Tensors = tuple[torch.Tensor, ...]


class JoinedShards:
    """Shards as one array of token ids.

    Args:
        shards: uint16 or uint32, 1-D each
        vocab_size: ids of this value or more are refused when they are read
    """

    def __init__(self, shards: list[np.ndarray], vocab_size: int = 2**16):
        self.names = [
            getattr(shard, "filename", f"shard {number}") for number, shard in enumerate(shards)
        ]
        # plain arrays, because slicing a memmap object is slow
        self.shards = [np.asarray(shard) for shard in shards]
        # position of the first token of each shard, and of the end
        self.starts = np.concatenate([[0], np.cumsum([len(shard) for shard in shards])])
        self.dtype = np.result_type(np.uint16, *(shard.dtype for shard in self.shards))
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Return `count` tokens from each position, with zeros past the end.

        Args:
            starts: positions, int64 (batch,)

        Returns:
            uint16 or uint32 (batch, count)

        Raises:
            DamagedShard: an id is outside of the vocabulary
        """
        tokens = np.zeros((len(starts), count), dtype=self.dtype)
        shard_numbers = self.find_shards(starts)
        for row, start, number in zip(tokens, starts.tolist(), shard_numbers.tolist()):
            filled = 0
            while filled < count and number < len(self.shards):
                begin = start + filled - int(self.starts[number])
                part = self.shards[number][begin : begin + count - filled]
                row[filled : filled + len(part)] = part
                filled += len(part)
                number += 1
        # an id outside of the embedding would end in an anonymous CUDA assertion
        if tokens.size and tokens.max() >= self.vocab_size:
            raise DamagedShard(self.describe_wrong_id(starts, tokens))
        return tokens

    def find_shards(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the shards that hold these positions."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def describe_wrong_id(self, starts: np.ndarray, tokens: np.ndarray) -> str:
        """Say where the first id outside of the vocabulary is."""
        row, column = np.argwhere(tokens >= self.vocab_size)[0].tolist()
        position = int(starts[row]) + column
        [number] = self.find_shards(np.array([position]))
        return (
            f"{self.names[number]} holds token id {tokens[row, column]} at "
            f"{position - self.starts[number]}, but the vocabulary has {self.vocab_size} ids; the "
            "shard is damaged, or its meta.json belongs to another corpus"
        )


def keyed_permutation(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Permute 0, ..., size - 1 in a random order that depends on the key, without storing it.

    A Feistel network of four rounds permutes the numbers below a power of four. It is applied again
    to results that are not below size ("cycle walking").

    Args:
        index: the numbers to permute, int64 (count,)

    Returns:
        their images, int64 (count,)
    """
    half_bits = max(((size - 1).bit_length() + 1) // 2, 1)
    mask = np.uint64((1 << half_bits) - 1)
    round_keys = np.random.Generator(np.random.PCG64(key)).integers(0, 2**64, 4, dtype=np.uint64)

    def encrypt(numbers: np.ndarray) -> np.ndarray:
        left = numbers >> np.uint64(half_bits)
        right = numbers & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << np.uint64(half_bits)) | right

    # at most three in four numbers are not below size, so that few repetitions are needed
    result = encrypt(index.astype(np.uint64))
    while (outside := result >= size).any():
        result[outside] = encrypt(result[outside])
    return result.astype(np.int64)


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64, in which every input bit changes every output bit."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


class Batches:
    """The sequences of one split.

    Args:
        shards: token ids, 1-D each
        layout: for a corpus whose documents all have one length; each is one sequence

    Raises:
        ValueError: seq_len is not the length of the documents, or the split is too short
    """

    split: str

    def __init__(
        self,
        shards: list[np.ndarray],
        seq_len: int,
        vocab_size: int = 2**16,
        layout: SequenceLayout | None = None,
    ):
        self.tokens = JoinedShards(shards, vocab_size)
        self.seq_len = seq_len
        self.layout = layout
        if layout is None:
            # the last target of a sequence is the first id of the next one
            self.overlap = 1
            self.stride = seq_len
        else:
            self.overlap = 0
            self.stride = layout.window_tokens
            if seq_len != layout.seq_len:
                raise ValueError(
                    f"block_size={seq_len}, but the sequences of this corpus have "
                    f"{layout.window_tokens} tokens each, targets included; give "
                    f"--block_size={layout.seq_len}"
                )
        self.num_full_sequences = (len(self.tokens) - self.overlap) // self.stride
        # a shorter validation split is one short sequence
        may_be_short = layout is None and self.split == "validation"
        if self.num_full_sequences < 1 and not may_be_short:
            raise ValueError(
                f"the {self.split} split has {len(self.tokens)} tokens, but block_size={seq_len} "
                f"needs {self.stride + self.overlap} or more; give a smaller block_size, or "
                "prepare more text"
            )

    def read(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and targets of the sequences at these positions, int64 (batch, seq_len) each."""
        tokens = self.tokens.read(starts, self.stride + self.overlap)
        if self.layout is not None:
            return self.layout.ids_and_targets(tokens)
        ids = torch.from_numpy(tokens[:, :-1].astype(np.int64))
        targets = torch.from_numpy(tokens[:, 1:].astype(np.int64))
        return ids, targets


class TrainBatches(Batches):
    """Random sequences of the training split."""

    split = "training"

    def __init__(
        self,
        shards: list[np.ndarray],
        seq_len: int,
        global_batch_size: int,
        seed: int,
        vocab_size: int = 2**16,
        layout: SequenceLayout | None = None,
    ):
        super().__init__(shards, seq_len, vocab_size, layout)
        self.global_batch_size = global_batch_size
        self.seed = seed
        if layout is None:
            # One sequence fewer than fit at offset 0, so that an epoch has the same number of
            # sequences at every offset.
            self.num_sequences = max(self.num_full_sequences - 1, 1)
        else:
            self.num_sequences = self.num_full_sequences
        # tokens that an epoch does not visit
        self.num_dropped_tokens = len(self.tokens) - self.overlap - self.num_sequences * self.stride
        self.max_offset = self.num_dropped_tokens if layout is None else 0

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Return the positions of the first tokens of sequences, by their number in the run.

        Args:
            numbers: int64 (batch,)

        Returns:
            int64 (batch,)
        """
        epochs, indices = np.divmod(numbers, self.num_sequences)
        starts = np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            is_in_epoch = epochs == epoch
            rng = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            # each epoch has its own offset, so that it cuts the text at other positions
            offset = rng.integers(0, self.max_offset + 1)
            [key] = np.random.SeedSequence([self.seed, epoch, 1]).generate_state(1, np.uint64)
            order = keyed_permutation(indices[is_in_epoch], self.num_sequences, int(key))
            starts[is_in_epoch] = offset + order * self.stride
        return starts

    def get(self, step: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `count` sequences of the batch of a step, from sequence `first` on.

        Returns:
            ids and targets, int64 (count, seq_len) each
        """
        begin = step * self.global_batch_size + first
        return self.read(self.starts(np.arange(begin, begin + count)))

    def loss_weights(self, step: int, micro_batch_size: int) -> torch.Tensor | None:
        """Return how much the loss of each micro-batch counts in the batch of a step.

        The weight is the number of targets of the micro-batch over the mean number, so that the
        mean of loss times weight is the mean over all targets of the batch; all weights are 0 if it
        has none. A model's auxiliary loss, which has no targets, is weighted like the rest.

        Returns:
            float32 (global_batch_size / micro_batch_size,); None if all sequences of the corpus have
            the same number of targets, as they have if these are the next tokens
        """
        if self.layout is None or self.layout.same_num_targets:
            return None
        _, targets = self.get(step, 0, self.global_batch_size)
        is_target = targets != IGNORED_TARGET
        counts = is_target.view(-1, micro_batch_size * self.seq_len).sum(1)
        return (counts / counts.double().mean().clamp_min(1e-9)).float()


class ValidationBatches(Batches):
    """The validation split in order.

    Sequence i predicts the tokens i * seq_len + 1, ..., (i + 1) * seq_len, and the last sequence
    those that are left, so that every token except the first is a target exactly once.
    """

    split = "validation"

    def __init__(
        self,
        shards: list[np.ndarray],
        seq_len: int,
        vocab_size: int = 2**16,
        layout: SequenceLayout | None = None,
    ):
        super().__init__(shards, seq_len, vocab_size, layout)
        num_tokens = len(self.tokens)
        if num_tokens < 2:
            raise ValueError(
                f"the validation split has {num_tokens} tokens, but needs 2 or more; prepare more "
                "text"
            )
        if layout is None:
            # rounded up
            self.num_sequences = -(-(num_tokens - 1) // seq_len)
        else:
            self.num_sequences = self.num_full_sequences
        # positions whose answers are counted, bool (seq_len,); None for a corpus without answers
        self.scored = None
        if layout is not None and layout.scored:
            self.scored = layout.mask(layout.scored)

    def spread(self, count: int | None = None, part: str = "all") -> list[int]:
        """Return the indices of `count` sequences, or of all, evenly spread over the split.

        Args:
            part: "all", or "first" or "second" half of the split
        """
        half = self.num_sequences // 2
        first = half if part == "second" else 0
        end = half if part == "first" else self.num_sequences
        num_available = end - first
        count = num_available if count is None else min(count, num_available)
        return sorted(set(np.linspace(first, end - 1, count).round().astype(int).tolist()))

    def get(self, sequences: list[int], batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch of these sequences, filled up to batch_size with empty ones.

        Returns:
            ids and targets, int64 (batch_size, seq_len) each; past the end of the split and in
            empty sequences, ids are 0 and targets -1
        """
        # an empty sequence starts past the end
        starts = np.full(batch_size, len(self.tokens))
        starts[: len(sequences)] = np.array(sequences, dtype=np.int64) * self.stride
        ids, targets = self.read(starts)
        num_targets = torch.from_numpy(len(self.tokens) - 1 - starts)
        is_past_end = torch.arange(self.seq_len) >= num_targets[:, None]
        return ids.masked_fill_(is_past_end, 0), targets.masked_fill_(is_past_end, IGNORED_TARGET)


def prefetched(
    make: Callable[[Request], Tensors],
    requests: Iterable[Request],
    device: torch.device,
    ahead: int = 2,
) -> Iterator[Tensors]:
    """Yield `make(request)` on a device for each request, in order.

    A thread prepares up to `ahead` of them while the caller computes.
    """
    uses_cuda = device.type == "cuda"
    waiting_requests = iter(requests)

    def work(request: Request) -> Tensors:
        tensors = make(request)
        if uses_cuda:
            # pinned memory is copied to a GPU while the program continues
            tensors = tuple(tensor.pin_memory() for tensor in tensors)
        return tensors

    def initialize_thread() -> None:
        if uses_cuda:
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(1, initializer=initialize_thread) as pool:
        pending = deque()
        while True:
            while len(pending) < ahead and (request := next(waiting_requests, None)) is not None:
                pending.append(pool.submit(work, request))
            if not pending:
                return
            ready = pending.popleft().result()
            yield tuple(tensor.to(device, non_blocking=True) for tensor in ready)
