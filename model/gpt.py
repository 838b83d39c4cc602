"""The Transformer backbone shared by every variant; only the residual stream differs.

A model is a subclass of `GPT` that names its classes: `Config`, `Expander`, `Block`, `Readout` and,
if it has another, `FinalNorm` (see the thin files `model/<stem>.py`). Notation in shapes: B batch,
T tokens, d hidden_size.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from model import cost
from model.block import Block, Direct, Stream
from model.decoding import Cache
from model.layers import (
    CausalSelfAttention,
    Heads,
    Positions,
    RMSNorm,
    at_least_fp32,
    compute_dtype,
    for_product,
    rope_tables,
)
from model.loss import linear_cross_entropy, scaled
from model.options import check_ranges, option
from model.parameters import (
    Rule,
    by_shape,
    linear,
    normal,
    refuse_shared_memory,
    refuse_unregistered,
    rules_of,
)


@dataclass
class GPTConfig:
    """Keys of every model.

    Raises:
        ValueError: a value is out of range; the message names the key, the value and the fix
    """

    # name of the key with the number of vectors of width d that the state of a token holds; None
    # for a model without such a key
    columns_key: ClassVar[str | None] = None

    vocab_size: int = option(
        50304,
        "vocabulary size; unless you set it, train.py uses the vocabulary size of the dataset, "
        "rounded up to a multiple of 64",
        low=1,
    )
    block_size: int = option(
        1024,
        "context length in tokens; unless you set it, train.py uses the document length if all "
        "documents of the dataset have the same length",
        low=1,
        free=True,
    )
    num_hidden_layers: int = option(
        12,
        "number of Transformer blocks; each has an attention and an MLP sublayer",
        low=1,
    )
    num_attention_heads: int = option(
        6,
        "number of attention heads per block",
        low=1,
    )
    hidden_size: int = option(
        768,
        "width d of the residual stream",
        low=1,
    )
    head_dim: int = option(
        128,
        "number of features per attention head",
        low=1,
    )
    rope_base: float = option(
        10000.0,
        "base of the rotary position embedding (RoPE); no effect with rope_ratio=0",
        above=1,
        counts_with=("rope_ratio", bool),
    )
    rope_ratio: float = option(
        1.0,
        "fraction of the features of each head that RoPE rotates; 0 disables RoPE",
        low=0,
        high=1,
    )
    state_dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16",
        "dtype of the residual state in a run that computes in bfloat16",
        free=True,
    )
    use_qk_rmsnorm: bool = option(
        True,
        "apply RMSNorm to the queries and keys of each head, after RoPE",
    )
    tie_embeddings: bool = option(
        True,
        "tie the weights of the output layer to the token embedding",
    )
    embedding_init_std: float = option(
        0.02,
        "standard deviation of the initial token embedding, and of an output layer that is not "
        "tied to the embedding",
        low=0,
        initial=True,
    )
    init: Literal["spectral", "normal"] = option(
        "spectral",
        "initialization of the matrices; spectral scales each matrix by its own shape, as the "
        "current code of the DDL authors does; normal draws every matrix from "
        "N(0, hidden_init_std_factor / sqrt(hidden_size)), as their earlier code did",
        initial=True,
        before="normal",
    )
    hidden_init_std_factor: float = option(
        0.5,
        "factor in the initial standard deviation of all matrices except embeddings; see init",
        low=0,
        initial=True,
    )
    num_hidden_layers_base: int | None = option(
        None,
        "base depth of depth scaling, which multiplies each sublayer's update of the residual "
        "state by num_hidden_layers_base / num_hidden_layers, so that hyperparameters tuned at "
        "this depth transfer to other depths (default: no depth scaling)",
        low=1,
    )
    residual_branch_mult: float | None = option(
        None,
        "factor on each sublayer's update X' - X of the residual state (default: "
        "num_hidden_layers_base / num_hidden_layers, or 1 without num_hidden_layers_base)",
        above=0,
    )
    mup: bool = option(
        False,
        "use muP, which scales the logits by hidden_size_base / hidden_size and the learning rates "
        "of matrices by powers of this ratio, so that hyperparameters tuned at width "
        "hidden_size_base transfer to other widths",
    )
    hidden_size_base: int = option(
        1024,
        "base width of muP, at which muP changes nothing",
        low=1,
        counts_with=("mup", True),
    )

    def __post_init__(self):
        check_ranges(self)

    @property
    def hidden_init_std(self) -> float:
        """Return the standard deviation of a matrix with init=normal."""
        return self.hidden_init_std_factor / math.sqrt(self.hidden_size)

    def notes(self) -> list[str]:
        """Return warnings about the training of this model, a sentence each."""
        return []

    def matrix_start(self, last: bool = False) -> Callable[[nn.Parameter], object]:
        """Return the function that initializes a matrix in place.

        Args:
            last: for the output matrix of a sublayer, which is scaled down because the outputs of
                all sublayers add up in the residual stream
        """
        layers = self.num_hidden_layers_base or self.num_hidden_layers
        if self.init == "spectral":
            return by_shape(self.hidden_init_std_factor / (layers if last else 1))
        return normal(self.hidden_init_std / (math.sqrt(layers) if last else 1))

    @property
    def branch_mult(self) -> float:
        """Return the factor on the update X' - X of every sublayer."""
        if self.residual_branch_mult is not None:
            return self.residual_branch_mult
        if self.num_hidden_layers_base is None:
            return 1.0
        return self.num_hidden_layers_base / self.num_hidden_layers

    @property
    def mup_scale(self) -> float:
        """Return muP's factor on the logits; learning rates are scaled by powers of it."""
        return self.hidden_size_base / self.hidden_size if self.mup else 1.0


def final_norm(config: GPTConfig) -> nn.Module:
    """The norm of the readout, before the output layer."""
    return RMSNorm(config.hidden_size)


def takes_branch_mult(write: type) -> bool:
    """Whether the class whose `forward` a write runs says that it applies config.branch_mult."""
    # A subclass with a forward of its own has to say it again.
    owner = next(each for each in write.__mro__ if "forward" in vars(each))
    return vars(owner).get("takes_branch_mult", False)


class GPT(nn.Module):
    """logits, loss = model(ids, targets): the whole language model.

    Sources: backbone of Deep Delta Learning (arXiv 2601.00417); the residual stream is the
    subclass's choice.
    """

    Config, Block, Expander, Readout = GPTConfig, Block, Direct, Direct
    FinalNorm = staticmethod(final_norm)
    # Keys, {key: value}, that make other parameters or paths than the defaults: checks try each.
    forms: tuple[dict, ...] = ()
    stream = Stream()
    # keep the states between blocks alone and compute each block again backward
    activation_checkpointing = False

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config, self.variant = config, type(self)  # FSDP will make another class of it
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        rule = Rule(normal(config.embedding_init_std), decay=True, rounded=True)
        self.transformer.wte.rules = {"weight": rule}
        self.transformer.h = nn.ModuleList(
            self.Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.input_embed = self.Expander(config)
        self.readout = self.Readout(config)
        self.ln_f = self.FinalNorm(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size, rule)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        if config.branch_mult != 1:
            for write in (site.write for block in self.transformer.h for site in block.sites):
                if not takes_branch_mult(type(write)):
                    key = f"residual_branch_mult={config.branch_mult:g}"
                    why = f"the write of this stream ({type(write).__name__}) has no such factor"
                    raise ValueError(f"{key}: {why}: leave it and num_hidden_layers_base out")
        for name in ("rope_cos", "rope_sin"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.reset_rope()
        self.init_weights()

    def reset_rope(self) -> None:
        weight = self.transformer.wte.weight
        dtype = at_least_fp32(weight.dtype)
        self.rope_cos, self.rope_sin = rope_tables(self.config, weight.device, dtype)

    def _apply(self, fn, recurse=True):
        # .to(), .double(), .bfloat16(): the tables follow, but computed anew, never rounded down.
        super()._apply(fn, recurse)
        self.reset_rope()
        return self

    @torch.no_grad()
    def init_weights(self) -> None:
        """Start every parameter as its rule says. ValueError: one has no rule, or two."""
        self.check_parameters()
        rules, layer = rules_of(self), nn.Linear | nn.Embedding
        layers = {f"{name}.weight" for name, m in self.named_modules() if isinstance(m, layer)}
        # The weights of layers come last: the order in which a seed's numbers are drawn.
        for name, parameter in sorted(self.named_parameters(), key=lambda item: item[0] in layers):
            rules[name].start(parameter)

    def check_parameters(self) -> None:
        """ValueError: a site uses a parameter that is not registered, or two share memory."""
        sites = [site for block in self.transformer.h for site in block.sites]
        parts = [part for site in sites for part in vars(site).values()]
        refuse_shared_memory(self)
        refuse_unregistered(self, [part for part in parts if isinstance(part, nn.Module)])

    def from_additive(self) -> None:
        """Set the stream's own parameters so that the model computes what the additive model did
        whose backbone it has. ValueError: the stream cannot begin so.
        """
        raise ValueError(getattr(self.Block, "not_additive", "it has no start that is additive"))

    def use_stream(self, stream: Stream) -> None:
        for module in (self, *self.transformer.h):
            module.stream = stream

    def use_heads(self, heads: Heads) -> None:
        for module in self.modules():
            if isinstance(module, CausalSelfAttention):
                module.heads = heads

    @contextlib.contextmanager
    def through(self, stream: Stream):
        """Meet the residual stream by this one inside; `Stream()` takes every step by itself."""
        before = self.stream
        self.use_stream(stream)
        try:
            yield
        finally:
            self.use_stream(before)

    def num_parameters(self) -> int:
        """All parameters; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations of a training step per token, at block_size tokens.

        A multiply-add counts two. Counted: matrix products, attention over the whole context, as is
        usual, and the reads and writes of the residual stream; not norms, activations and the
        optimizer. Backward is twice forward.
        """
        return 3 * cost.forward_flops(self.variant, self.config) // self.config.block_size

    def state_bytes_per_token(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of one token's residual state where it is largest, kept in dtype."""
        return cost.state_size(self.variant, self.config) * dtype.itemsize

    def new_cache(self, length: int | None = None) -> Cache:
        """An empty cache for `forward`, of at most `length` tokens.

        ValueError: more than block_size, the default.
        """
        block_size = self.config.block_size
        length = block_size if length is None else length
        if not 1 <= length <= block_size:
            raise ValueError(f"length={length}: give 1 to block_size={block_size}")
        return Cache(self.config.num_hidden_layers, length, self.rope_cos.device)

    def state_dtype(self) -> torch.dtype:
        """The dtype of the residual state: that of products; state_dtype=float32: at least fp32."""
        dtype = compute_dtype(self.transformer.wte.weight)
        return at_least_fp32(dtype) if self.config.state_dtype == "float32" else dtype

    def positions(self, ids, cache: Cache | None = None, seen: int = 0) -> Positions:
        """Of ids (B, T), which follow the cache's tokens and attend over its first `seen`."""
        T = ids.shape[1]
        if cache is None:
            place = torch.arange(T, device=ids.device).unsqueeze(0)
            return Positions(self.rope_cos[:T], self.rope_sin[:T], ids, place)
        index = cache.position + torch.arange(T, device=cache.position.device)
        since_start = (index - cache.start).clamp_min(0)  # (B, T): RoPE counts from the first token
        mask = None
        if seen != T or cache.padded:
            keys, queries = torch.arange(seen, device=index.device), index[:, None]
            mask = (keys <= queries) & (keys >= cache.start[:, None])
            # What stands for no token attends to itself alone: to nothing at all would be 0 / 0.
            mask = (mask | (keys == queries)).unsqueeze(1)
        tables = self.rope_cos[since_start], self.rope_sin[since_start]
        return Positions(*tables, ids, since_start, index, mask, cache.length)

    def hidden(self, ids, cache: Cache | None = None, seen: int = 0):
        """ids (B, T) -> the normed readout (B, T, d), which `logits` takes.

        With a cache, the tokens attend over the first `seen` of its positions; the caller has
        reserved theirs.
        """
        return self.hidden_and_extra_loss(ids, cache, seen)[0]

    def hidden_and_extra_loss(self, ids, cache: Cache | None = None, seen: int = 0):
        """(`hidden`, the sum of all sites' extra losses, None without any)."""
        caches = [None] * (len(self.transformer.h) + 1) if cache is None else cache.blocks
        positions, losses = self.positions(ids, cache, seen), []
        x = positions.embed(self.transformer.wte)
        state = self.stream.begin(self, x.to(self.state_dtype()), caches[-1])
        for block, block_cache in zip(self.transformer.h, caches):
            if self.activation_checkpointing and cache is None and torch.is_grad_enabled():
                state, loss = checkpoint(block, state, positions, use_reentrant=False)
            else:
                state, loss = block(state, positions, block_cache)
            losses += [] if loss is None else [loss]
        if cache is not None:
            cache.position.add_(ids.shape[1])
        return self.stream.finish(self, state, caches[-1]), sum(losses) if losses else None

    def logits(self, hidden):
        """hidden (..., d) of `hidden` -> logits (..., vocab_size).

        The one place for a head of another kind: what it computes is trained, evaluated, sampled
        from and exported.
        """
        return scaled(self.lm_head(for_product(hidden, self.lm_head.weight)), self.config.mup_scale)

    def logits_are_a_product(self) -> bool:
        """Whether no subclass has another head: then the loss needs no memory for all logits."""
        plain = type(self.lm_head) is nn.Linear and self.lm_head.bias is None
        return plain and type(self).logits is GPT.logits

    def forward(self, ids, targets=None, cache: Cache | None = None, return_logits: bool = False):
        """ids, targets: int64 (B, T); targets of -1 do not count.

        Returns (logits, loss). With targets, loss is the mean cross-entropy in nats (a scalar, at
        least fp32) and logits is None unless `return_logits`; without, logits is (B, T, vocab_size)
        and loss None. Where a stream has an extra loss, the value of loss is the cross-entropy all
        the same, but its gradient that of both. With a `cache` of `new_cache()`, ids continue the
        tokens of the calls before (the first may be `padded`), and only the output layer has a
        gradient. ValueError: more tokens than block_size, or than fit the cache.
        """
        if cache is not None:
            with torch.no_grad():
                hidden, extra = self.hidden_and_extra_loss(ids, cache, cache.reserve(ids))
        elif ids.shape[1] > self.config.block_size:
            block_size = self.config.block_size
            raise ValueError(
                f"{ids.shape[1]} tokens do not fit block_size={block_size}: give fewer"
            )
        else:
            hidden, extra = self.hidden_and_extra_loss(ids)
        logits, loss = None, None
        in_chunks = targets is not None and not return_logits and self.logits_are_a_product()
        if not in_chunks:
            logits = self.logits(hidden)
        if targets is not None and not in_chunks:
            every = logits.flatten(0, 1).to(at_least_fp32(logits.dtype))
            loss = F.cross_entropy(every, targets.flatten(), ignore_index=-1)
            logits = logits if return_logits else None
        elif in_chunks:
            weight, scale = self.lm_head.weight, self.config.mup_scale
            hidden = hidden.flatten(0, 1).to(compute_dtype(weight))
            loss = linear_cross_entropy(hidden, weight, targets.flatten(), scale)
        # The value stays the cross-entropy, which runs are compared by; the gradient is of both.
        if loss is not None and extra is not None:
            loss = loss + (extra - extra.detach())
        return logits, loss
