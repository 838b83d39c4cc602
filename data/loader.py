"""Training and validation batches as pure functions of (seed, step, sequence index): nothing to save, nothing to lose.

The shards of a split are read as one stream of tokens. An epoch cuts it into windows of seq_len + 1 tokens with stride
seq_len, from an offset that is drawn anew for each epoch, and visits every window once, in a keyed random order that
needs no memory. Sequence i of step s is number s * global_batch_size + i of the whole run, whoever computes it.
"""

import numpy as np
import torch


class TokenStream:
    """Shards (uint16, 1-D each) as one array: `stream.read(start, count)` crosses shard boundaries."""

    def __init__(self, shards: list[np.ndarray]):
        self.shards = shards
        self.starts = np.concatenate([[0], np.cumsum([len(shard) for shard in shards])])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count), int64; fewer where the stream ends."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        parts = []
        for index in range(first, len(self.shards)):
            if self.starts[index] >= start + count:
                break
            begin = max(start - int(self.starts[index]), 0)
            parts.append(self.shards[index][begin : start + count - int(self.starts[index])])
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)


def keyed_permutation(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """A bijection of 0..size-1 that depends on key: a four-round Feistel network, walked until it lands below size."""
    half_bits = max(((size - 1).bit_length() + 1) // 2, 1)
    mask = np.uint64((1 << half_bits) - 1)
    round_keys = np.random.Generator(np.random.PCG64(key)).integers(0, 2**64, 4, dtype=np.uint64)

    def encrypt(x):
        left, right = x >> np.uint64(half_bits), x & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << np.uint64(half_bits)) | right

    result = encrypt(index.astype(np.uint64))
    while (outside := result >= size).any():
        result[outside] = encrypt(result[outside])
    return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit reaches every output bit. uint64 arithmetic wraps by design."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class TrainBatches:
    """Random windows of the training split. ValueError: it is shorter than one window."""

    def __init__(self, shards: list[np.ndarray], seq_len: int, global_batch_size: int, seed: int):
        self.stream, self.seq_len = TokenStream(shards), seq_len
        self.global_batch_size, self.seed = global_batch_size, seed
        tokens = len(self.stream)
        if tokens < seq_len + 1:
            raise ValueError(
                f"the training split has {tokens} tokens, block_size={seq_len} needs {seq_len + 1} or more"
            )
        # One window fewer than fit at offset 0, so that every offset up to a window and the tail holds as many.
        self.windows = max((tokens - 1) // seq_len - 1, 1)
        self.max_offset = tokens - 1 - self.windows * seq_len

    def start(self, number: int) -> int:
        """First token of sequence `number` of the run."""
        epoch, index = divmod(number, self.windows)
        offset = int(np.random.Generator(np.random.PCG64([self.seed, epoch])).integers(0, self.max_offset + 1))
        window = keyed_permutation(np.array([index]), self.windows, hash_key(self.seed, epoch))[0]
        return offset + int(window) * self.seq_len

    def get(self, step: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and targets, int64 (count, seq_len), of sequences first..first+count-1 of the global batch of `step`."""
        numbers = range(step * self.global_batch_size + first, step * self.global_batch_size + first + count)
        windows = torch.from_numpy(np.stack([self.stream.read(self.start(n), self.seq_len + 1) for n in numbers]))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def hash_key(seed: int, epoch: int) -> int:
    """A 64-bit key from two integers."""
    return int(np.random.SeedSequence([seed, epoch, 1]).generate_state(1, np.uint64)[0])


class ValidationBatches:
    """The validation split in order: window w predicts tokens w*seq_len+1 .. (w+1)*seq_len, the last one what is left.

    Every token but the first is a target exactly once. ValueError: fewer than two tokens.
    """

    def __init__(self, shards: list[np.ndarray], seq_len: int):
        self.stream, self.seq_len = TokenStream(shards), seq_len
        if len(self.stream) < 2:
            raise ValueError(f"the validation split has {len(self.stream)} tokens, it needs 2 or more")
        self.windows = -(-(len(self.stream) - 1) // seq_len)

    def spread(self, count: int) -> list[int]:
        """`count` windows (all, where there are fewer) evenly over the split."""
        return sorted(set(np.linspace(0, self.windows - 1, min(count, self.windows)).round().astype(int).tolist()))

    def get(self, windows: list[int], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and targets, int64 (rows, seq_len); rows and positions past the end hold id 0 and target -1."""
        ids = torch.zeros(rows, self.seq_len, dtype=torch.int64)
        targets = torch.full((rows, self.seq_len), -1, dtype=torch.int64)
        for row, window in enumerate(windows):
            tokens = torch.from_numpy(self.stream.read(window * self.seq_len, self.seq_len + 1))
            ids[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        return ids, targets
