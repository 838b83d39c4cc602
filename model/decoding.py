"""Decoding token by token: a decoder that repeats one step.

Every tensor that a step uses has a fixed shape and address (model/cache.py), so that a step that is
compiled or captured once serves all positions.
"""

from collections.abc import Callable

import torch

from .cache import NO_TOKEN
from .gpt import GPT
from .parameters import collect_rules


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


def round_matrices(model: GPT, dtype: torch.dtype = torch.bfloat16) -> None:
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
        model: GPT,
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
