"""Training and validation batches as pure functions of (seed, step, sequence index).

The shards of a split are joined into one stream of tokens. An epoch cuts the stream into sequences
of seq_len + 1 tokens with stride seq_len, from a random offset, and visits each of them once in a
random order that needs no memory. Sequence i of the batch of step s has number
s * global_batch_size + i in the run, whichever rank computes it.

Documents are joined without a boundary in attention: a token attends to earlier documents of its
sequence, as in nanoGPT and llm.c.

The sequences of a synthetic task are drawn instead of read: sequence i of the batch of step s is
number s * global_batch_size + i of its training split.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from data import tasks
from data.shards import Corpus, DamagedShard
from data.tasks import IGNORED_TARGET, Task

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

    Raises:
        ValueError: the split is too short
    """

    split: str
    min_sequences: int

    def __init__(self, shards: list[np.ndarray], seq_len: int, vocab_size: int = 2**16):
        self.tokens = JoinedShards(shards, vocab_size)
        self.seq_len = seq_len
        # the last target of a sequence is the first id of the next one
        self.num_full_sequences = (len(self.tokens) - 1) // seq_len
        if self.num_full_sequences < self.min_sequences:
            raise ValueError(
                f"the {self.split} split has {len(self.tokens)} tokens, but block_size={seq_len} "
                f"needs {seq_len + 1} or more; give a smaller block_size, or prepare more text"
            )

    def read(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and targets of the sequences at these positions, int64 (batch, seq_len) each."""
        tokens = self.tokens.read(starts, self.seq_len + 1)
        ids = torch.from_numpy(tokens[:, :-1].astype(np.int64))
        targets = torch.from_numpy(tokens[:, 1:].astype(np.int64))
        return ids, targets


class TrainBatches(Batches):
    """Random sequences of the training split."""

    split = "training"
    min_sequences = 1

    def __init__(
        self,
        shards: list[np.ndarray],
        seq_len: int,
        global_batch_size: int,
        seed: int,
        vocab_size: int = 2**16,
    ):
        super().__init__(shards, seq_len, vocab_size)
        self.global_batch_size = global_batch_size
        self.seed = seed
        # One sequence fewer than fit at offset 0, so that an epoch has the same number of sequences
        # at every offset.
        self.num_sequences = max(self.num_full_sequences - 1, 1)
        # tokens that an epoch does not visit
        self.num_dropped_tokens = len(self.tokens) - 1 - self.num_sequences * seq_len

    def describe_epoch(self) -> str:
        """Say how many sequences an epoch has."""
        return (
            f"1 epoch = {self.num_sequences:,} sequences ({self.num_dropped_tokens:,} of "
            f"{len(self.tokens):,} tokens dropped, different ones each epoch)"
        )

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
            offset = rng.integers(0, self.num_dropped_tokens + 1)
            [key] = np.random.SeedSequence([self.seed, epoch, 1]).generate_state(1, np.uint64)
            order = keyed_permutation(indices[is_in_epoch], self.num_sequences, int(key))
            starts[is_in_epoch] = offset + order * self.seq_len
        return starts

    def get(self, step: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `count` sequences of the batch of a step, both counted from 0, from sequence `first` on.

        Returns:
            ids and targets, int64 (count, seq_len) each
        """
        begin = step * self.global_batch_size + first
        return self.read(self.starts(np.arange(begin, begin + count)))


class ValidationBatches(Batches):
    """The validation split in order.

    Sequence i predicts the tokens i * seq_len + 1, ..., (i + 1) * seq_len, and the last sequence
    those that are left, so that every token except the first is a target exactly once.
    """

    split = "validation"
    # a short split is one short sequence
    min_sequences = 0

    # positions whose answers are counted, bool (seq_len,); None for text
    scored: torch.Tensor | None = None

    def __init__(self, shards: list[np.ndarray], seq_len: int, vocab_size: int = 2**16):
        super().__init__(shards, seq_len, vocab_size)
        self.num_targets = len(self.tokens) - 1
        if self.num_targets < 1:
            raise ValueError(
                f"the validation split has {len(self.tokens)} tokens, but needs 2 or more; prepare "
                "more text"
            )
        # rounded up
        self.num_sequences = -(-self.num_targets // seq_len)

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
        starts[: len(sequences)] = np.array(sequences, dtype=np.int64) * self.seq_len
        ids, targets = self.read(starts)
        num_targets = torch.from_numpy(self.num_targets - starts)
        is_past_end = torch.arange(self.seq_len) >= num_targets[:, None]
        return ids.masked_fill_(is_past_end, 0), targets.masked_fill_(is_past_end, IGNORED_TARGET)


# ---- synthetic tasks ----


class TaskSequences:
    """The sequences of one split of a task, which are drawn when they are read.

    Of TrainBatches and ValidationBatches it replaces what reads shards.
    """

    def __init__(self, task: Task, seed: int, split: str):
        self.seq_len = task.seq_len

        # sequences that are read together are drawn together
        @functools.lru_cache(maxsize=8)
        def draw_block(number: int) -> tuple[np.ndarray, np.ndarray]:
            return task.draw_block(seed, split, number)

        self.draw_block = draw_block

    def read(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and targets of sequences by number, int64 (batch, seq_len) each."""
        ids = np.empty((len(numbers), self.seq_len), dtype=np.int64)
        targets = np.empty_like(ids)
        blocks, rows = np.divmod(numbers, tasks.BLOCK)
        for block in np.unique(blocks).tolist():
            is_in_block = blocks == block
            block_ids, block_targets = self.draw_block(block)
            ids[is_in_block] = block_ids[rows[is_in_block]]
            targets[is_in_block] = block_targets[rows[is_in_block]]
        return torch.from_numpy(ids), torch.from_numpy(targets)


class TaskTrainBatches(TaskSequences, TrainBatches):
    """Training sequences of a task, each of which is drawn once."""

    num_sequences = None  # without end

    def __init__(self, task: Task, global_batch_size: int, seed: int):
        TaskSequences.__init__(self, task, seed, "train")
        self.global_batch_size = global_batch_size

    def describe_epoch(self) -> str:
        return "the sequences of every step are new"

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        return numbers


class TaskValidationBatches(TaskSequences, ValidationBatches):
    """Validation sequences of a task, which are the same in all runs."""

    num_sequences = tasks.VAL_SEQUENCES
    num_full_sequences = num_sequences

    def __init__(self, task: Task):
        TaskSequences.__init__(self, task, 0, "val")
        self.num_targets = self.num_sequences * self.seq_len
        self.scored = torch.arange(self.seq_len) >= task.first_answer

    def get(self, sequences: list[int], batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(batch_size, self.seq_len, dtype=torch.int64)
        targets = torch.full_like(ids, IGNORED_TARGET)
        count = len(sequences)
        ids[:count], targets[:count] = self.read(np.array(sequences, dtype=np.int64))
        return ids, targets


# ---- the splits of a corpus ----


def open_train_batches(
    corpus: Corpus, seq_len: int, global_batch_size: int, seed: int
) -> TrainBatches:
    """Return the training batches of a corpus.

    Raises:
        ValueError: the split has less than a batch, or the sequences of a task have another length
    """
    if corpus.is_task:
        return TaskTrainBatches(find_task(corpus, seq_len), global_batch_size, seed)
    batches = TrainBatches(
        corpus.train, seq_len, global_batch_size, seed, vocab_size=corpus.meta["vocab_size"]
    )
    # an epoch is shuffled as a whole, so a batch must fit into one
    if batches.num_sequences < global_batch_size:
        raise ValueError(
            f"global_batch_size={global_batch_size}, but the training split of {corpus.path} has "
            f"{batches.num_sequences} sequences of block_size={seq_len}; give a smaller batch, or "
            "more text"
        )
    return batches


def open_validation_batches(corpus: Corpus, seq_len: int) -> ValidationBatches:
    """Return the validation sequences of a corpus.

    Raises:
        ValueError: the split has no target, or the sequences of a task have another length
    """
    if corpus.is_task:
        return TaskValidationBatches(find_task(corpus, seq_len))
    return ValidationBatches(corpus.val, seq_len, vocab_size=corpus.meta["vocab_size"])


def find_task(corpus: Corpus, seq_len: int) -> Task:
    """Return the task of a corpus, whose sequences must have this length."""
    task = tasks.from_meta(corpus.meta)
    if seq_len != task.seq_len:
        raise ValueError(
            f"block_size={seq_len}, but the sequences of {corpus.path} have {task.seq_len} "
            f"positions; give --block_size={task.seq_len}"
        )
    return task


# ---- reading ahead ----


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
