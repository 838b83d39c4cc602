"""The Transformer backbone shared by every variant; only the residual stream differs.

A model is a subclass of `GPT` that names four classes: `Config`, `Expander`, `Block` and `Readout` (see the thin files
`model/<stem>.py`). Notation in shapes: B batch, T tokens, d hidden_size, H heads, L num_hidden_layers.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from model.decoding import NO_TOKEN, Cache, kept
from model.keys import Key, check_ranges
from model.loss import linear_cross_entropy, scaled

INITIAL = Key(low=0, initial=True)


@dataclass
class GPTConfig:
    """Keys of every model.

    ValueError: a value out of range; the message names the key, the value and the fix.
    """

    vocab_size: Annotated[int, "rows of the embedding; train.py's default: the corpus's, padded to 64s", Key(low=1)] = (
        50304
    )
    block_size: Annotated[int, "tokens per sequence", Key(low=1, free=True)] = 1024
    num_hidden_layers: Annotated[int, "blocks; each holds an attention and an MLP sublayer", Key(low=1)] = 12
    num_attention_heads: Annotated[int, "attention heads per block", Key(low=1)] = 6
    hidden_size: Annotated[int, "width d of the residual stream", Key(low=1)] = 768
    head_dim: Annotated[int, "features per attention head", Key(low=1)] = 128
    rope_base: Annotated[float, "base of the rotary position embedding, usually 10000", Key(above=1)] = 10000.0
    rope_ratio: Annotated[float, "share of each head's features that is rotated", Key(low=0, high=1)] = 1.0
    use_qk_rmsnorm: Annotated[bool, "RMS-normalise queries and keys over each head"] = True
    embedding_init_std: Annotated[float, "initial standard deviation of the embedding", INITIAL] = 0.02
    hidden_init_std_factor: Annotated[float, "matrices start at N(0, factor / sqrt(hidden_size))", INITIAL] = 0.5
    mup: Annotated[bool, "muP: scale matrix learning rates and logits by hidden_size_base / hidden_size"] = False
    hidden_size_base: Annotated[int, "width at which muP changes nothing", Key(low=1)] = 1024

    def __post_init__(self):
        check_ranges(self)

    @property
    def hidden_init_std(self) -> float:
        return self.hidden_init_std_factor / math.sqrt(self.hidden_size)

    @property
    def mup_scale(self) -> float:
        """Factor on the logits and on the learning rates of matrices."""
        return self.hidden_size_base / self.hidden_size if self.mup else 1.0


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precisions, float64 for float64: statistics, gates and dot products are computed in it."""
    return torch.promote_types(dtype, torch.float32)


def for_product(x, weight):
    """x in the dtype of the weight that it meets; as it is under autocast, which rounds both at the product itself."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(weight.dtype)


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last axis; statistics in at least fp32, output in x's dtype."""

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def init_parameters(self) -> tuple[str, ...]:
        nn.init.ones_(self.weight)
        return ("weight",)

    def forward(self, x):
        y = F.rms_norm(x.to(at_least_fp32(x.dtype)), self.weight.shape, eps=self.eps)
        return (y * self.weight).to(x.dtype)


def linear_flops(module: nn.Module) -> int:
    """Forward operations per token of the linear layers in module, each applied once."""
    return sum(2 * layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


def rope_tables(config: GPTConfig, device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position times inverse frequency, each (block_size, rotary_dim / 2)."""
    rotary_dim = int(config.head_dim * config.rope_ratio) // 2 * 2
    exponent = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float64) / max(rotary_dim, 1)
    position = torch.arange(config.block_size, device=device, dtype=torch.float64)
    angle = torch.outer(position, config.rope_base**-exponent)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x, cos, sin):
    """Rotate the first features of x (B, T, H, head_dim) in half-split pairs; cos, sin ([B,] T, rotary_dim / 2)."""
    half = cos.shape[-1]
    x = x.to(cos.dtype)
    x1, x2, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # broadcast over heads
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos, rest), dim=-1)


class Places(NamedTuple):
    """Where the T tokens of a call are: their rows of the RoPE tables and, with a cache, the rest.

    index (T,) int64: their places among the cache's `length`. mask (B, 1, T, seen) bool: which of the cache's first
    places each attends over; None: all of the call's own up to itself.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    index: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    length: int = 0


# On a GPU, layers that share their input are one product from so many tokens on: below, copying their weights side by
# side would cost more than it saves. On a CPU it was measured, and is not faster (results/step_choices.md).
TOKENS_FOR_ONE_PRODUCT = 1024
# GEMMs on a GPU want widths that are a multiple of this: others are filled up with zeros.
WIDTH_MULTIPLE = 64


def as_one_product(x) -> bool:
    """Whether layers that share their input x (..., d) are computed as one."""
    return x.device.type == "cuda" and x.shape[:-1].numel() >= TOKENS_FOR_ONE_PRODUCT


def joined_product(x, *layers: nn.Linear):
    """The layers' outputs for x, side by side in one tensor."""
    if as_one_product(x):
        return F.linear(x, torch.cat([layer.weight for layer in layers]))
    return torch.cat([layer(x) for layer in layers], dim=-1)


class Heads:
    """How attention makes its heads: every step by itself. `model/kernels` has one that fuses them."""

    def __call__(self, attention, x, places: Places):
        """x (B, T, d) in the weights' dtype -> queries, keys, values (B, T, H, head_dim)."""
        layers = attention.c_q, attention.c_k, attention.c_v
        if as_one_product(x):
            parts = joined_product(x, *layers).chunk(3, dim=-1)
        else:
            parts = [layer(x) for layer in layers]
        q, k, v = (part.unflatten(-1, (attention.num_heads, attention.head_dim)) for part in parts)
        # One rounding to the compute dtype, after rotation and norm.
        q = attention.q_rms(apply_rope(q, places.cos, places.sin)).to(v.dtype)
        k = attention.k_rms(apply_rope(k, places.cos, places.sin)).to(v.dtype)
        return q, k, v


class CausalSelfAttention(nn.Module):
    """Multi-head attention with RoPE, then RMSNorm on queries and keys; x (B, T, d) -> (B, T, d)."""

    heads = Heads()

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        inner = self.num_heads * self.head_dim
        self.c_q = nn.Linear(config.hidden_size, inner, bias=False)
        self.c_k = nn.Linear(config.hidden_size, inner, bias=False)
        self.c_v = nn.Linear(config.hidden_size, inner, bias=False)
        self.c_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_rms = RMSNorm(self.head_dim) if config.use_qk_rmsnorm else nn.Identity()
        self.k_rms = RMSNorm(self.head_dim) if config.use_qk_rmsnorm else nn.Identity()

    def forward(self, x, places: Places, cache: dict | None = None):
        x = for_product(x, self.c_q.weight)
        q, k, v = (z.transpose(1, 2) for z in self.heads(self, x, places))  # (B, H, T, head_dim)
        if cache is not None:
            shape = (*k.shape[:2], places.length, k.shape[3])
            keys, values = (kept(cache, n, shape, z).index_copy_(2, places.index, z) for n, z in (("k", k), ("v", v)))
            if places.mask is not None:
                k, v = (z[:, :, : places.mask.shape[-1]] for z in (keys, values))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=places.mask, is_causal=places.mask is None)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: c_proj(silu(c_fc1 x) * c_fc2 x), inner width floor(8/3 d)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        inner = 8 * config.hidden_size // 3
        self.c_fc1 = nn.Linear(config.hidden_size, inner, bias=False)
        self.c_fc2 = nn.Linear(config.hidden_size, inner, bias=False)
        self.c_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x):
        x = for_product(x, self.c_fc1.weight)
        if not as_one_product(x):
            return self.c_proj(F.silu(self.c_fc1(x)) * self.c_fc2(x))
        # The same function: what is filled up is silu(0) * 0 = 0, and meets weights of zero.
        gap = -self.c_fc1.out_features % WIDTH_MULTIPLE
        both = torch.cat([F.pad(layer.weight, (0, 0, 0, gap)) for layer in (self.c_fc1, self.c_fc2)])
        gate, value = F.linear(x, both).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * value, F.pad(self.c_proj.weight, (0, gap)))


class Stream:
    """How a model meets its residual stream: every step by itself. `model/kernels` has one that fuses them.

    `begin` gives the state that the blocks hand on, which is this class's own affair; `finish` the normed readout.
    """

    def begin(self, model, x, cache: dict | None):
        return model.input_embed(x, cache, "input_embed")

    def read(self, block, site: str, state, cache: dict | None):
        """(state, the sublayer's normed input c (B, T, d), what the write needs from before the sublayer)."""
        x_in, aux = block.read_state(site, state, cache)
        return state, (block.ln_1 if site == "attn" else block.ln_2)(x_in), aux

    def write(self, block, site: str, state, h, c, aux):
        return block.write_state(site, state, h, c, aux)

    def finish(self, model, state, cache: dict | None):
        return model.ln_f(model.readout(state, cache, "readout"))


class Block(nn.Module):
    """An attention and an MLP site that read from and write to the residual stream; here X' = X + F(norm(X)).

    A variant overrides `read_state` and `write_state`. `aux` carries what the write needs from before the sublayer
    (tensors only). `cache` is one dict per block, or None outside cached evaluation.
    """

    stream = Stream()

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = RMSNorm(config.hidden_size)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = RMSNorm(config.hidden_size)
        self.mlp = MLP(config)

    def state_size(self) -> int:
        """Numbers in one token's state."""
        return self.ln_1.weight.numel()

    def residual_flops_per_token(self) -> int:
        """Forward operations of both sites' reads and writes: here two additions of d numbers."""
        return 2 * self.state_size()

    def read_state(self, site: str, state, cache):
        """state -> (x_in (B, T, d), aux)."""
        return state, None

    def write_state(self, site: str, state, h, c, aux):
        """state, sublayer output h (B, T, d), its normed input c (B, T, d) -> new state."""
        return state + h

    def forward(self, state, places: Places, cache: dict | None = None):
        state, c, aux = self.stream.read(self, "attn", state, cache)
        state = self.stream.write(self, "attn", state, self.attn(c, places, cache), c, aux)
        state, c, aux = self.stream.read(self, "mlp", state, cache)
        return self.stream.write(self, "mlp", state, self.mlp(c), c, aux)


class Direct(nn.Module):
    """Expander and readout of a stream that is (B, T, d) itself."""

    def __init__(self, config: GPTConfig):
        super().__init__()

    def flops_per_token(self) -> int:
        return 0

    def forward(self, x, cache: dict | None = None, slot: str = ""):
        return x


class GPT(nn.Module):
    """logits, loss = model(ids, targets): the whole language model.

    Sources: backbone of Deep Delta Learning (arXiv 2601.00417); the residual stream is the subclass's choice.
    """

    Config, Expander, Block, Readout = GPTConfig, Direct, Block, Direct
    stream = Stream()
    activation_checkpointing = False  # keep the states between blocks alone and compute each block again backward

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.transformer.h = nn.ModuleList(self.Block(config) for _ in range(config.num_hidden_layers))
        self.input_embed = self.Expander(config)
        self.readout = self.Readout(config)
        self.ln_f = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        for name in ("rope_cos", "rope_sin"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.reset_rope()
        self.init_weights()

    def reset_rope(self) -> None:
        weight = self.transformer.wte.weight
        self.rope_cos, self.rope_sin = rope_tables(self.config, weight.device, at_least_fp32(weight.dtype))

    def _apply(self, fn, recurse=True):
        # .to(), .double(), .bfloat16(): the tables follow the device but are computed anew, never rounded down.
        super()._apply(fn, recurse)
        self.reset_rope()
        return self

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter exactly once: each module's own `init_parameters`, then the rule for matrices."""
        config, left = self.config, dict(self.named_parameters())
        for prefix, module in self.named_modules():
            for name in module.init_parameters() if hasattr(module, "init_parameters") else ():
                del left[f"{prefix}.{name}" if prefix else name]  # KeyError: initialised twice
        for name, parameter in left.items():
            assert parameter.ndim >= 2, f"{name} has no initialisation"
            std = config.hidden_init_std
            if name == "transformer.wte.weight":
                std = config.embedding_init_std
            elif name.endswith(("attn.c_proj.weight", "mlp.c_proj.weight")):
                std /= math.sqrt(config.num_hidden_layers)
            nn.init.normal_(parameter, std=std)

    def use_stream(self, stream: Stream) -> None:
        for module in (self, *self.transformer.h):
            module.stream = stream

    def use_heads(self, heads: Heads) -> None:
        for block in self.transformer.h:
            block.attn.heads = heads

    @contextlib.contextmanager
    def plain_stream(self):
        """Take every step by itself inside, for hooks that look at states and writes."""
        stream = self.stream
        self.use_stream(Stream())
        try:
            yield
        finally:
            self.use_stream(stream)

    def num_parameters(self) -> int:
        """All parameters; the tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations of a training step (forward and backward) per token, at block_size tokens.

        A multiply-add counts two. Counted: matrix products, attention over the whole context, as is usual, and the
        reads and writes of the residual stream; not norms, activations and the optimizer. Backward is twice forward.
        """
        c = self.config
        attention = 4 * c.block_size * c.num_attention_heads * c.head_dim
        forward = linear_flops(self.lm_head) + self.input_embed.flops_per_token() + self.readout.flops_per_token()
        for block in self.transformer.h:
            forward += linear_flops(block.attn) + attention + linear_flops(block.mlp) + block.residual_flops_per_token()
        return 3 * forward

    def state_bytes_per_token(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of one token's residual state, kept in dtype."""
        return self.transformer.h[0].state_size() * dtype.itemsize

    def new_cache(self, length: int | None = None) -> Cache:
        """An empty cache for `forward`, of at most `length` tokens. ValueError: more than block_size, the default."""
        block_size = self.config.block_size
        length = block_size if length is None else length
        if not 1 <= length <= block_size:
            raise ValueError(f"length={length}: give 1 to block_size={block_size}")
        return Cache(self.config.num_hidden_layers, length, self.rope_cos.device)

    def compute_dtype(self) -> torch.dtype:
        """The dtype of the residual state: autocast's where it is on, else the parameters'."""
        weight = self.transformer.wte.weight
        if torch.is_autocast_enabled(weight.device.type):
            return torch.get_autocast_dtype(weight.device.type)
        return weight.dtype

    def places(self, T: int, cache: Cache, seen: int) -> Places:
        """Of the T tokens that follow those in the cache, and attend over the first `seen` of its places."""
        index = cache.position + torch.arange(T, device=cache.position.device)
        since_start = (index - cache.start).clamp_min(0)  # (B, T): RoPE counts from a sequence's first token
        mask = None
        if seen != T or cache.padded:
            place, own = torch.arange(seen, device=index.device), index[:, None]
            # What stands for no token attends to itself alone: to nothing at all would be 0 / 0.
            mask = ((place <= own) & (place >= cache.start[:, None]) | (place == own)).unsqueeze(1)
        return Places(self.rope_cos[since_start], self.rope_sin[since_start], index, mask, cache.length)

    def hidden(self, ids, cache: Cache | None = None, seen: int = 0):
        """ids (B, T) -> the normed readout (B, T, d), which `logits` takes.

        With a cache, the tokens attend over the first `seen` of its places; the caller has reserved theirs.
        """
        T, caches = ids.shape[1], [None] * (len(self.transformer.h) + 1)
        if cache is None:
            places, x = Places(self.rope_cos[:T], self.rope_sin[:T]), self.transformer.wte(ids)
        else:
            # From no token to the readout, every step of a stream maps zero to zero: a convolution over tokens sees
            # before a shorter sequence what it sees before a first token.
            x = self.transformer.wte(ids.clamp_min(0)) * (ids != NO_TOKEN).unsqueeze(-1)
            places, caches = self.places(T, cache, seen), cache.blocks
        state = self.stream.begin(self, x.to(self.compute_dtype()), caches[-1])
        for block, block_cache in zip(self.transformer.h, caches):
            if self.activation_checkpointing and cache is None and torch.is_grad_enabled():
                state = checkpoint(block, state, places, use_reentrant=False)
            else:
                state = block(state, places, block_cache)
        if cache is not None:
            cache.position.add_(T)
        return self.stream.finish(self, state, caches[-1])

    def logits(self, hidden):
        return scaled(self.lm_head(for_product(hidden, self.lm_head.weight)), self.config.mup_scale)

    def forward(self, ids, targets=None, cache: Cache | None = None, return_logits: bool = False):
        """ids, targets: int64 (B, T); targets of -1 do not count.

        Returns (logits, loss). With targets, loss is the mean cross-entropy in nats (a scalar, at least fp32) and
        logits is None unless `return_logits`; without, logits is (B, T, vocab_size) and loss None. With a `cache` of
        `new_cache()`, ids continue the tokens of the calls before (the first may be `padded`), and only the output
        layer has a gradient.
        ValueError: more tokens than block_size, or than fit the cache.
        """
        if cache is not None:
            with torch.no_grad():
                hidden = self.hidden(ids, cache, cache.reserve(ids))
        elif ids.shape[1] > self.config.block_size:
            raise ValueError(f"{ids.shape[1]} tokens do not fit block_size={self.config.block_size}: give fewer")
        else:
            hidden = self.hidden(ids)
        if targets is None or return_logits:
            logits = self.logits(hidden)
            if targets is None:
                return logits, None
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        hidden = hidden.flatten(0, 1).to(self.compute_dtype())
        return None, linear_cross_entropy(hidden, self.lm_head.weight, targets.flatten(), self.config.mup_scale)
