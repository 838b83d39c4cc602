"""The Transformer backbone that all variants share; only the residual stream differs.

A variant is a subclass of `GPT` that names the classes of its stream: `Config`, `Expander`, `Block`,
`Readout` and, if it has another final norm, `FinalNorm` (see the files `model/<variant>.py`).
Notation in shapes: B batch, T tokens, d hidden_size.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .block import Block, Direct, Site, Stream
from .cache import Cache
from .config import GPTConfig
from .layers import Positions, RMSNorm, rope_tables
from .loss import linear_cross_entropy, scale_logits
from .parameters import Rule, collect_rules, linear, normal, start_by_name
from .precision import at_least_fp32, compute_dtype, for_product


class GPT(nn.Module):
    """The language model: `logits, loss = model(ids, targets)`.

    It is the backbone of Deep Delta Learning (arXiv 2601.00417) with an additive residual stream,
    which subclasses replace.
    """

    Config: type[GPTConfig] = GPTConfig
    # Functions of the config, most often classes. The expander maps the embedding (B, T, d) to the
    # state, the blocks map the state to a state, the readout and the final norm map it to (B, T, d).
    Expander: Callable = Direct
    Block: Callable = Block
    Readout: Callable = Direct
    FinalNorm: Callable = staticmethod(lambda config: RMSNorm(config.hidden_size))

    stream = Stream()

    # store only the states between blocks and recompute each block in the backward pass
    activation_checkpointing = False

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.variant = type(self)  # because FSDP replaces the class of the module
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        embedding_rule = Rule(normal(config.embedding_init_std), decay=True)
        self.transformer.wte.rules = {"weight": embedding_rule}
        self.transformer.h = nn.ModuleList(
            self.Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.input_embed = self.Expander(config)
        self.readout = self.Readout(config)
        self.ln_f = self.FinalNorm(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size, embedding_rule)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        self.register_buffer("rope_cos", torch.empty(0), persistent=False)
        self.register_buffer("rope_sin", torch.empty(0), persistent=False)
        self.reset_rope()
        self.init_weights()

    @property
    def sites(self) -> list[Site]:
        """Return the sites of all blocks, in the order in which they run."""
        return [site for block in self.transformer.h for site in block.sites]

    def reset_rope(self) -> None:
        """Compute the RoPE tables, on the device of the weights and in at least fp32."""
        weight = self.transformer.wte.weight
        dtype = at_least_fp32(weight.dtype)
        self.rope_cos, self.rope_sin = rope_tables(self.config, weight.device, dtype)

    def _apply(self, fn: Callable, recurse: bool = True) -> "GPT":
        # .to(), .double(), .bfloat16(): the tables are computed anew, so that they are never rounded
        super()._apply(fn, recurse)
        self.reset_rope()
        return self

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize every parameter as its rule says, from the seed of torch's global generator.

        On the meta device there is nothing to initialize, but the rules are checked.

        Raises:
            ValueError: a parameter has no rule
        """
        rules = collect_rules(self)
        if self.transformer.wte.weight.is_meta:
            return
        for name, parameter in self.named_parameters():
            start_by_name(name, parameter, rules[name], seed=torch.initial_seed())

    def use_stream(self, stream: Stream) -> None:
        """Run the residual stream by this object."""
        self.stream = stream
        for block in self.transformer.h:
            block.stream = stream

    @contextlib.contextmanager
    def through(self, stream: Stream) -> Iterator[None]:
        """Run the residual stream by this object inside the context.

        `Stream()` takes one operation at a time; a subclass of it can observe or change each read
        and write.
        """
        previous_stream = self.stream
        self.use_stream(stream)
        try:
            yield
        finally:
            self.use_stream(previous_stream)

    def num_parameters(self) -> int:
        """Return the number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def new_cache(self, length: int | None = None) -> Cache:
        """Return an empty cache for `forward`.

        Args:
            length: number of tokens that it can hold (default: block_size)

        Raises:
            ValueError: length is not in 1 to block_size
        """
        block_size = self.config.block_size
        if length is None:
            length = block_size
        if not 1 <= length <= block_size:
            raise ValueError(f"length={length}: give 1 to block_size={block_size}")
        return Cache(self.config.num_hidden_layers, length, self.rope_cos.device)

    def state_dtype(self) -> torch.dtype:
        """Return the dtype of the residual state; see the key state_dtype."""
        dtype = compute_dtype(self.transformer.wte.weight)
        return at_least_fp32(dtype) if self.config.state_dtype == "float32" else dtype

    def positions(
        self, ids: torch.Tensor, cache: Cache | None = None, num_attended: int = 0
    ) -> Positions:
        """Return the positions, RoPE tables and attention mask of a call.

        Args:
            ids: token ids (B, T), int64; with a cache they continue its tokens
            cache: the cache, which has reserved places for ids
            num_attended: number of positions at the beginning of the cache that the mask covers
        """
        num_tokens = ids.shape[1]
        offsets = torch.arange(num_tokens, device=ids.device)
        if cache is None:
            return Positions(
                cos=self.rope_cos[:num_tokens],
                sin=self.rope_sin[:num_tokens],
                ids=ids,
                in_sequence=offsets.unsqueeze(0),
            )
        in_cache = cache.position + offsets
        # RoPE counts from the first token of each sequence, to the right of its padding.
        in_sequence = (in_cache - cache.start).clamp_min(0)  # (B, T)
        mask = None
        if num_attended != num_tokens or cache.padded:
            keys = torch.arange(num_attended, device=in_cache.device)
            queries = in_cache[:, None]
            mask = (keys <= queries) & (keys >= cache.start[:, None])
            # Padding attends to itself, because a softmax over nothing would be NaN.
            mask = (mask | (keys == queries)).unsqueeze(1)
        return Positions(
            cos=self.rope_cos[in_sequence],
            sin=self.rope_sin[in_sequence],
            ids=ids,
            in_sequence=in_sequence,
            in_cache=in_cache,
            mask=mask,
            cache_length=cache.length,
        )

    def hidden(
        self, ids: torch.Tensor, cache: Cache | None = None, num_attended: int = 0
    ) -> torch.Tensor:
        """Return the input of the output layer, (B, T, d), of token ids (B, T).

        Args:
            ids: int64
            cache: a cache that has reserved places for ids
            num_attended: with a cache, the number of its positions to attend to
        """
        # A cache has an entry for each block and a last one for the expander and the readout.
        block_caches = [None] * len(self.transformer.h)
        outer_cache = None
        if cache is not None:
            *block_caches, outer_cache = cache.blocks
        positions = self.positions(ids, cache, num_attended)
        x = positions.embed(self.transformer.wte).to(self.state_dtype())
        state = self.stream.begin(self, x, outer_cache)
        recompute = self.activation_checkpointing and cache is None and torch.is_grad_enabled()
        for block, block_cache in zip(self.transformer.h, block_caches):
            if recompute:
                state = checkpoint(block, state, positions, use_reentrant=False)
            else:
                state = block(state, positions, block_cache)
        if cache is not None:
            cache.position.add_(ids.shape[1])
        return self.stream.finish(self, state, outer_cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., vocab_size) of `hidden` (..., d).

        Override it for another head: training, evaluation, generation and export all use it.
        """
        return scale_logits(
            self.lm_head(for_product(hidden, self.lm_head.weight)), self.config.mup_scale
        )

    def has_linear_head(self) -> bool:
        """Return whether the logits are one matrix product, so that the loss can be chunked."""
        is_linear = type(self.lm_head) is nn.Linear and self.lm_head.bias is None
        return is_linear and type(self).logits is GPT.logits

    def forward(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        cache: Cache | None = None,
        return_logits: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (logits, loss).

        Without targets, loss is None. With targets, logits is None unless return_logits is set, so
        that they need not be in memory all at once.

        Args:
            ids: token ids (B, T), int64
            targets: ids of the next tokens (B, T), int64; -1 is ignored
            cache: a cache of `new_cache`, whose tokens ids continue; the first call may have padding
                at the left (see `pad_left` in model/cache.py). Only the output layer then has a
                gradient.
            return_logits: whether to return the logits in addition to the loss

        Returns:
            logits (B, T, vocab_size), or None
            the mean cross-entropy in nats, a scalar in at least fp32, or None

        Raises:
            ValueError: there are more tokens than block_size, or than fit in the cache
        """
        if cache is not None:
            num_attended = cache.reserve(ids)
            with torch.no_grad():
                hidden = self.hidden(ids, cache, num_attended)
        else:
            self.check_length(ids)
            hidden = self.hidden(ids)

        if targets is None:
            return self.logits(hidden), None

        if self.has_linear_head() and not return_logits:
            # the logits are computed and used in chunks
            logits = None
            weight = self.lm_head.weight
            loss = linear_cross_entropy(
                hidden.flatten(0, 1).to(compute_dtype(weight)),
                weight,
                targets.flatten(),
                self.config.mup_scale,
            )
        else:
            logits = self.logits(hidden)
            flat_logits = logits.flatten(0, 1).to(at_least_fp32(logits.dtype))
            loss = F.cross_entropy(flat_logits, targets.flatten(), ignore_index=-1)
        return logits if return_logits else None, loss

    def check_length(self, ids: torch.Tensor) -> None:
        """Raise ValueError if ids (B, T) are longer than the context."""
        block_size = self.config.block_size
        if ids.shape[1] > block_size:
            raise ValueError(
                f"{ids.shape[1]} tokens do not fit block_size={block_size}: give fewer"
            )
