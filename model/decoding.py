"""Text token by token: what a model keeps of the tokens so far, and a decoder that runs one step
again and again.

Everything a step touches has a fixed shape and address, and its position is a number on the device,
so that a step compiled or captured once serves every position.
"""

import torch

from model.parameters import rules_of

NO_TOKEN = -1  # an id that stands for nothing, on the left of shorter sequences in a batch


def padded(sequences: list[list[int]], device: torch.device | str = "cpu"):
    """Token ids as int64 (B, T), NO_TOKEN on the left of shorter ones. ValueError: an empty one."""
    if not all(sequences):
        fix = "give one token or more (end-of-text stands before a text)"
        raise ValueError(f"an empty sequence: {fix}")
    longest = max(map(len, sequences))
    rows = [[NO_TOKEN] * (longest - len(ids)) + list(ids) for ids in sequences]
    return torch.tensor(rows, device=device)


class Cache:
    """What a model keeps of the `tokens` read so far, at most `length`: keys, values and token
    convolutions' contexts.

    `blocks` holds one dict of tensors per block, and a last one for the expander and the readout.
    The first call makes the tensors, for its batch and dtypes; later calls write into them.
    `position` (1,) int64 is `tokens` on the device.

    Sequences of unequal length end together: shorter ones have ids of -1, NO_TOKEN, on their left
    in the first call. `start` (B, 1) int64 counts them; `padded` tells whether there are any.
    """

    def __init__(self, blocks: int, length: int, device: torch.device):
        self.length, self.tokens, self.padded = length, 0, False
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.start: torch.Tensor | None = None
        self.blocks: list[dict] = [{} for _ in range(blocks + 1)]

    def reserve(self, ids) -> int:
        """Count the tokens ids (B, T), which are about to be read, and return how many there are.

        ValueError: they do not fit, or it is not the batch that the cache was begun with.
        """
        (batch_size, tokens), begun = ids.shape, self.start is not None
        if self.tokens + tokens > self.length:
            size = f"a cache of length={self.length}"
            raise ValueError(f"{self.tokens + tokens} tokens do not fit {size}: give fewer")
        if begun and batch_size != len(self.start):
            reason = f"this cache is of {len(self.start)} sequences; make another"
            raise ValueError(f"batch_size={batch_size}: {reason}")
        if not begun:
            self.start = self.position.new_zeros(batch_size, 1)
        if self.tokens == 0:
            self.start.copy_((ids == NO_TOKEN).sum(1, keepdim=True))
            self.padded = bool((self.start > 0).any())
        self.tokens += tokens
        return self.tokens

    def reset(self) -> None:
        """Forget all tokens; the tensors stay where they are."""
        self.tokens = 0
        kept_tensors = [tensor for block in self.blocks for tensor in block.values()]
        for tensor in (self.position, self.start, *kept_tensors):
            if tensor is not None:
                tensor.zero_()

    def select(self, rows) -> "Cache":
        """A new cache of these rows (N,) int64: for beams, and continuations of one prefix."""
        other = Cache(len(self.blocks) - 1, self.length, self.position.device)
        other.tokens, other.padded, other.position = self.tokens, self.padded, self.position.clone()
        other.start = None if self.start is None else self.start[rows]
        for mine, block in zip(other.blocks, self.blocks):
            mine.update({slot: tensor[rows] for slot, tensor in block.items()})
        return other


def get_or_create_buffer(
    cache: dict, slot: str, shape: tuple, like, dtype: torch.dtype | None = None
):
    """Return the tensor in a slot of a block's cache, to be written in place; zeros at first."""
    if slot not in cache:
        cache[slot] = like.new_zeros(shape, dtype=dtype)
    return cache[slot]


def round_matrices(model, dtype: torch.dtype = torch.bfloat16) -> None:
    """Keep in `dtype` what autocast rounds to it at every use, as the parameters' rules say.

    Under autocast the results have the same bits, for half the memory. What is computed in fp32
    stays as it is.
    """
    for name, rule in rules_of(model).items():
        if rule.rounded:
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(dtype)


class Decoder:
    """Logits of the next token for a batch of sequences of at most `length` tokens (by default
    block_size).

        decoder = Decoder(model, batch_size=2, compiled=True)
        logits = decoder.prefill(padded(prompts))  # (2, T) -> (2, vocab_size)
        logits = decoder.step(tokens)      # (2,) -> (2, vocab_size), again and again

    compiled: the step is made once for all positions, on a CPU by torch.compile (seconds), on a GPU
    as a CUDA graph, which one call launches. It attends over all `length` positions, masked, where
    an eager step reads only those that are filled. The weights, `model.stream` and autocast must
    stay what they were when the decoder was made. For bfloat16 take `round_matrices(model)` under
    autocast: weights of float32 would be rounded anew at every step.
    """

    def __init__(self, model, batch_size: int, length: int | None = None, compiled: bool = False):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give 1 or more")
        self.model, self.cache = model, model.new_cache(length)
        self.token = self.cache.position.new_zeros(batch_size, 1)  # int64
        self.fixed_step = None
        if compiled:
            with torch.no_grad():
                self.fixed_step = self.captured() if self.token.is_cuda else self.compiled()

    def logits(self, ids, seen: int):
        """ids (B, T), which attend over the first `seen` places -> logits after the last (B, V)."""
        return self.model.logits(self.model.hidden(ids, self.cache, seen)[:, -1])

    def warm_up(self, step) -> None:
        """Run a step before it counts: it makes the cache's tensors, and compiles what it needs."""
        self.cache.reserve(self.token)
        step(self.token, self.cache.length)
        self.cache.reset()

    def compiled(self):
        """The step through torch.compile."""
        step = torch.compile(self.logits, fullgraph=True)
        self.warm_up(self.logits)
        self.warm_up(step)
        return lambda: step(self.token, self.cache.length)

    def captured(self):
        """The step as a CUDA graph, which reads `token` and always writes the same logits."""
        # Weights that autocast rounds must be rounded within the graph: the copies that it keeps go
        # when it ends.
        rounding = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        autocast = torch.autocast("cuda", *rounding, cache_enabled=False)
        with torch.cuda.device(self.token.device), autocast:
            self.warm_up(self.logits)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            # libraries and kernels set themselves up where no capture is disturbed
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.warm_up(self.logits)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self.logits(self.token, self.cache.length)

        def step():
            graph.replay()
            return logits.clone()  # the next replay writes there

        return step

    @torch.no_grad()
    def prefill(self, ids):
        """Forget what was read; ids (B, T), `padded` where lengths differ -> logits after the last.

        ValueError: they do not fit.
        """
        self.check_batch(ids)
        if not 1 <= ids.shape[1] <= self.cache.length:
            size = f"a decoder of length={self.cache.length}"
            raise ValueError(f"a prompt of {ids.shape[1]} tokens for {size}: give 1 to that many")
        self.cache.reset()
        return self.logits(ids, self.cache.reserve(ids))

    @torch.no_grad()
    def step(self, token):
        """Next tokens (B,) -> logits after them (B, V). ValueError: `length` is reached."""
        self.check_batch(token)
        self.token.copy_(token.unsqueeze(1))
        seen = self.cache.reserve(self.token)
        return self.logits(self.token, seen) if self.fixed_step is None else self.fixed_step()

    def check_batch(self, ids) -> None:
        if len(ids) != len(self.token):
            size = f"a decoder of batch_size={len(self.token)}"
            raise ValueError(f"{len(ids)} sequences for {size}: give that many")
