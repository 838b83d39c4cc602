"""Decoding token by token: the cache of a model, and a decoder that repeats one step.

Every tensor that a step uses has a fixed shape and address, and the position is a number on the
device, so that a step that is compiled or captured once serves all positions.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from .parameters import collect_rules

if TYPE_CHECKING:
    from .gpt import GPT

# Padding to the left of the shorter sequences of a batch.
NO_TOKEN = -1


def pad_left(sequences: list[list[int]], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return token ids as int64 (B, T), with NO_TOKEN to the left of shorter sequences.

    Raises:
        ValueError: a sequence is empty
    """
    if not all(sequences):
        raise ValueError(
            "a sequence is empty; give each sequence at least one token, such as the end-of-text "
            "token, with which documents begin in training"
        )
    max_length = max(map(len, sequences))
    rows = [[NO_TOKEN] * (max_length - len(ids)) + list(ids) for ids in sequences]
    return torch.tensor(rows, device=device)


class Folded(NamedTuple):
    """A tensor in a cache that is computed from parameters alone, whatever the tokens are."""

    tensor: torch.Tensor


class Cache:
    """What a model stores of the tokens so far: keys, values and the inputs of token convolutions.

    Sequences of unequal length end at the same position: the shorter ones have NO_TOKEN to their
    left in the first call. The parameters of the model must not change while a cache is in use.

    Attributes:
        length: number of tokens that it can hold
        num_tokens: number of tokens so far
        position: num_tokens on the device, int64 (1,)
        start: number of NO_TOKEN to the left of each sequence, int64 (B, 1); None before the first
            call
        padded: whether any sequence has NO_TOKEN to its left
        blocks: a dict of tensors for each block, and a last one for the expander and the readout.
            The first call creates the tensors, for its batch size and dtypes; later calls write into
            them, except for those in `Folded`.
    """

    def __init__(self, num_blocks: int, length: int, device: torch.device):
        self.length = length
        self.num_tokens = 0
        self.padded = False
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.start: torch.Tensor | None = None
        self.blocks: list[dict[str, torch.Tensor | Folded]] = [{} for _ in range(num_blocks + 1)]

    def reserve(self, ids: torch.Tensor) -> int:
        """Reserve places for ids (B, T), which the next call adds; return the number of all tokens.

        Raises:
            ValueError: they do not fit, or the batch size is not that of the first call
        """
        batch_size, new_tokens = ids.shape
        if self.num_tokens + new_tokens > self.length:
            raise ValueError(
                f"{self.num_tokens + new_tokens} tokens do not fit a cache of length={self.length}: "
                "give fewer"
            )
        if self.start is None:
            self.start = self.position.new_zeros(batch_size, 1)
        if batch_size != len(self.start):
            raise ValueError(
                f"batch_size={batch_size}: this cache is for {len(self.start)} sequences; create "
                "another one"
            )
        if self.num_tokens == 0:
            self.start.copy_((ids == NO_TOKEN).sum(1, keepdim=True))
            self.padded = bool((self.start > 0).any())
        self.num_tokens += new_tokens
        return self.num_tokens

    def reset(self) -> None:
        """Forget all tokens; the tensors keep their addresses."""
        self.num_tokens = 0
        self.position.zero_()
        if self.start is not None:
            self.start.zero_()
        for block in self.blocks:
            for content in block.values():
                if not isinstance(content, Folded):
                    content.zero_()

    def select(self, rows: torch.Tensor) -> "Cache":
        """Return a new cache of these rows (N,), int64: for beams, or to continue one prefix."""
        selected = Cache(len(self.blocks) - 1, self.length, self.position.device)
        selected.num_tokens = self.num_tokens
        selected.padded = self.padded
        selected.position = self.position.clone()
        if self.start is not None:
            selected.start = self.start[rows]
        for block, selected_block in zip(self.blocks, selected.blocks):
            for slot, content in block.items():
                is_folded = isinstance(content, Folded)
                selected_block[slot] = content if is_folded else content[rows]
        return selected


def get_or_create_buffer(
    cache: dict[str, torch.Tensor | Folded],
    slot: str,
    shape: tuple[int, ...],
    like: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the tensor in a slot of a block's cache, to be written in place; it starts at zero."""
    if slot not in cache:
        cache[slot] = like.new_zeros(shape, dtype=dtype)
    return cache[slot]


def get_or_fold(
    cache: dict[str, torch.Tensor | Folded], slot: str, fold: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return fold(), which is computed once for a cache; it must depend on parameters alone."""
    if slot not in cache:
        cache[slot] = Folded(fold())
    return cache[slot].tensor


def round_matrices(model: "GPT", dtype: torch.dtype = torch.bfloat16) -> None:
    """Store in dtype the parameters that autocast rounds at each use, as their rules say.

    Under autocast, the results have the same bits for half the memory. Other parameters stay as
    they are, and so does the embedding if the state is in float32, because it is the first state.
    """
    for name, rule in collect_rules(model).items():
        is_first_state = name == "transformer.wte.weight" and model.config.state_dtype == "float32"
        if rule.rounded and not is_first_state:
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(dtype)


class Decoder:
    """Computes the logits of the next token for a batch of sequences.

        decoder = Decoder(model, batch_size=2, compiled=True)
        logits = decoder.prefill(pad_left(prompts))  # (2, T) -> (2, vocab_size)
        logits = decoder.step(tokens)                # (2,) -> (2, vocab_size), any number of times

    The weights, `model.stream` and autocast must stay what they were when the decoder was created.
    For bfloat16, call `round_matrices(model)` and run it under autocast; float32 weights would be
    rounded anew at each step.

    Args:
        length: largest number of tokens of a sequence (default: block_size)
        compiled: whether to prepare the step once for all positions: by torch.compile on a CPU,
            which takes seconds, or as a CUDA graph on a GPU, which is one launch per step. Such a
            step attends over all `length` positions, masked; an eager step reads only those that
            are filled.
    """

    def __init__(
        self,
        model: "GPT",
        batch_size: int,
        length: int | None = None,
        compiled: bool = False,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give 1 or more")
        self.model = model
        self.cache = model.new_cache(length)
        self.token = self.cache.position.new_zeros(batch_size, 1)  # int64
        self.prepared_step: Callable[[], torch.Tensor] | None = None
        if compiled:
            with torch.no_grad():
                if self.token.is_cuda:
                    self.prepared_step = self.capture_step()
                else:
                    self.prepared_step = self.compile_step()

    def logits(self, ids: torch.Tensor, num_attended: int) -> torch.Tensor:
        """Return the logits (B, vocab_size) after the last of ids (B, T).

        num_attended: number of positions of the cache to attend to
        """
        hidden = self.model.hidden(ids, self.cache, num_attended)
        return self.model.logits(hidden[:, -1])

    def warm_up(self, step: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        """Run a step and forget it; it creates the tensors of the cache, and compiles kernels."""
        self.cache.reserve(self.token)
        step(self.token, self.cache.length)
        self.cache.reset()

    def compile_step(self) -> Callable[[], torch.Tensor]:
        """Return the step, compiled by torch.compile."""
        compiled_logits = torch.compile(self.logits, fullgraph=True)
        self.warm_up(self.logits)
        self.warm_up(compiled_logits)
        return lambda: compiled_logits(self.token, self.cache.length)

    def capture_step(self) -> Callable[[], torch.Tensor]:
        """Return the step as a CUDA graph, which reads `token`."""
        # Weights that autocast rounds must be rounded inside the graph, because autocast frees the
        # copies in its cache when it ends.
        autocast = torch.autocast(
            "cuda",
            dtype=torch.get_autocast_dtype("cuda"),
            enabled=torch.is_autocast_enabled("cuda"),
            cache_enabled=False,
        )
        with torch.cuda.device(self.token.device), autocast:
            self.warm_up(self.logits)
            side_stream = torch.cuda.Stream()
            side_stream.wait_stream(torch.cuda.current_stream())
            # libraries and kernels initialize themselves here, where no capture is disturbed
            with torch.cuda.stream(side_stream):
                for _ in range(3):
                    self.warm_up(self.logits)
            torch.cuda.current_stream().wait_stream(side_stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self.logits(self.token, self.cache.length)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits.clone()  # because the next replay overwrites them

        return replay

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Start anew with prompts ids (B, T), and return the logits (B, vocab_size) after them.

        ids: as `pad_left` returns them if the prompts differ in length

        Raises:
            ValueError: they do not fit
        """
        self.check_batch_size(ids)
        if not 1 <= ids.shape[1] <= self.cache.length:
            raise ValueError(
                f"the prompt has {ids.shape[1]} tokens, but the decoder has "
                f"length={self.cache.length}: give 1 to {self.cache.length} tokens"
            )
        self.cache.reset()
        num_attended = self.cache.reserve(ids)
        return self.logits(ids, num_attended)

    @torch.no_grad()
    def step(self, token: torch.Tensor) -> torch.Tensor:
        """Append a token to each sequence, (B,), and return the logits (B, vocab_size) after them.

        Raises:
            ValueError: the sequences have reached `length`
        """
        self.check_batch_size(token)
        self.token.copy_(token.unsqueeze(1))
        num_attended = self.cache.reserve(self.token)
        if self.prepared_step is not None:
            return self.prepared_step()
        return self.logits(self.token, num_attended)

    def check_batch_size(self, ids: torch.Tensor) -> None:
        if len(ids) != len(self.token):
            raise ValueError(
                f"got {len(ids)} sequences, but the decoder has batch_size={len(self.token)}: give "
                f"{len(self.token)} sequences"
            )
