"""The model for transformers. The model itself is in stem.py and gpt.py, next to this file.

It is loaded by from_pretrained(FOLDER, trust_remote_code=True), and supports generate() with
batches, sampling and beam search, and fine-tuning.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache import NO_TOKEN, Cache
from .configuration_ddl import DDLConfig
from .gpt import at_least_fp32
from .parameters import find_aliases
from .stem import Model

# transformers 5.24 renamed past_key_values, in calls and in outputs
CACHE_NAME = "past_key_values"
if "cache" in CausalLMOutputWithPast.__dataclass_fields__:
    CACHE_NAME = "cache"

UNSUPPORTED_ARGUMENTS = (
    "inputs_embeds",
    "position_ids",
    "output_attentions",
    "output_hidden_states",
)


class GenerationCache:
    """Wraps the model's own cache with the interface that generate() expects."""

    is_compileable = False
    # for transformers 5.24 and later: no layer has linear attention, and nothing can be dropped
    is_linear = (False,)
    is_croppable = False

    def __init__(self, cache: Cache):
        self.cache = cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.num_tokens

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.cache.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.cache = self.cache.select(beam_idx)


class DDLForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model whose logits (B, T, vocab_size) have at least float32 precision."""

    config_class = DDLConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # the cache cannot be cropped, which assisted generation would need
    _is_stateful = True

    def __init__(self, config: DDLConfig):
        super().__init__(config)
        gpt = Model(config.model_config())
        # The children of the model become children of this module, so that weights have the same
        # names as in training. object.__setattr__ does not register the model itself.
        for name, child in gpt.named_children():
            setattr(self, name, child)
        object.__setattr__(self, "gpt", gpt)
        self._tied_weights_keys = find_aliases(gpt)
        self.gradient_checkpointing = False
        self._no_split_modules = [type(gpt.transformer.h[0]).__name__]
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Raise ValueError if the file that is being loaded lacks a weight of this module.

        The model initializes itself when it is built. transformers calls this for every module of a
        new model, and while it loads a file, for modules with weights that are not in the file.
        """
        parameters = dict(self.named_parameters())
        missing_names = [
            name
            for name, parameter in parameters.items()
            if not getattr(parameter, "_is_hf_initialized", False)
        ]
        if len(missing_names) == len(parameters):  # nothing is loaded
            return
        own_ids = {id(parameter) for parameter in module.parameters(recurse=False)}
        for name in missing_names:
            if id(parameters[name]) in own_ids:
                raise ValueError(f"the weights file lacks {name}")

    def _apply(self, fn: Callable, recurse: bool = True) -> "DDLForCausalLM":
        super()._apply(fn, recurse)
        self.place_rope()
        return self

    def place_rope(self) -> None:
        """Recompute the RoPE tables if the weights have moved to another device or dtype.

        The tables are not weights, so they are not loaded or moved with them.
        """
        weight = self.transformer.wte.weight
        table = self.gpt.rope_cos
        if table.device != weight.device or table.dtype != at_least_fp32(weight.dtype):
            self.gpt.reset_rope()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        cache: GenerationCache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast | tuple:
        """Compute logits, and with labels the loss of the next tokens.

        With a cache, only the output layer has a gradient.

        Args:
            input_ids: int64 (B, T)
            attention_mask: (B, number of tokens so far), 0 at the padding, which is on the left; it
                may also be on the right if there is no cache
            past_key_values: the cache of an earlier call, to continue from
            cache: its name since transformers 5.24
            labels: int64 (B, T), -100 at tokens without a loss
            use_cache: return a new cache if there is none

        Raises:
            ValueError: there are more than block_size tokens, the mask has gaps, or this model does
                not support an argument
        """
        for name in UNSUPPORTED_ARGUMENTS:
            if kwargs.pop(name, None) not in (None, False):
                raise ValueError(f"{name} is not supported by this model; omit it")
        self.place_rope()
        self.gpt.activation_checkpointing = self.gradient_checkpointing and self.training
        if cache is None:
            cache = past_key_values
        if cache is None and use_cache:
            cache = self.new_cache()
        if cache is None:
            hidden = self.compute_hidden(input_ids, attention_mask)
        else:
            hidden = self.compute_hidden_with_cache(cache.cache, input_ids, attention_mask)
        positions = logits_to_keep
        if isinstance(logits_to_keep, int):
            positions = slice(-logits_to_keep, None)  # 0 keeps all
        logits = self.gpt.logits(hidden[:, positions])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_NAME: cache})
        return output if return_dict is not False else output.to_tuple()

    def compute_hidden(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the normalized readout (B, T, d) of ids (B, T) without a cache."""
        seq_len = ids.shape[1]
        if seq_len > self.config.block_size:
            raise ValueError(
                f"{seq_len} tokens do not fit block_size={self.config.block_size}; give fewer"
            )
        if mask is None:
            return self.gpt.hidden(ids)
        check_mask(mask, seq_len)
        # Padding on the left is rotated to the right, where no token attends to it.
        positions = torch.arange(seq_len, device=ids.device)  # (T,)
        num_padded = count_left_padding(mask)  # (B, 1)
        rotated_ids = ids.gather(1, (positions + num_padded) % seq_len)
        rotated_back = (positions - num_padded) % seq_len
        return self.gpt.hidden(rotated_ids).take_along_dim(rotated_back.unsqueeze(-1), 1)

    @torch.no_grad()
    def compute_hidden_with_cache(
        self, cache: Cache, ids: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the normalized readout (B, T, d) of ids (B, T), which follow those in the cache."""
        seq_len = ids.shape[1]
        if mask is not None and cache.num_tokens == 0:
            check_mask(mask, seq_len)
            if not mask[:, -1].all():
                raise ValueError(
                    "attention_mask: with a cache, sequences must end together; pad on the left"
                )
            positions = torch.arange(seq_len, device=ids.device)
            ids = ids.masked_fill(positions < count_left_padding(mask), NO_TOKEN)
        elif mask is not None and not mask[:, cache.num_tokens :].all():
            raise ValueError("attention_mask: tokens that follow a cache cannot be masked")
        return self.gpt.hidden(ids, cache, cache.reserve(ids))

    def new_cache(self, length: int | None = None) -> GenerationCache:
        """Return an empty cache for at most `length` tokens, by default block_size."""
        self.place_rope()
        return GenerationCache(self.gpt.new_cache(length))

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict,
        generation_mode: object,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Create the cache of a call of generate()."""
        if generation_config.cache_implementation is not None:
            raise ValueError("cache_implementation: this model has its own cache; omit the key")
        if model_kwargs.get(CACHE_NAME) is None and generation_config.use_cache:
            # a cache that is returned to the caller may be continued up to block_size
            length = None
            if not generation_config.return_dict_in_generate:
                length = min(max_cache_length, self.config.block_size)
            model_kwargs[CACHE_NAME] = self.new_cache(length)


def count_left_padding(mask: torch.Tensor) -> torch.Tensor:
    """Return the number of zeros before the first one of each row of a mask (B, T), as (B, 1)."""
    return (mask.cumsum(1) == 0).sum(1, keepdim=True) % mask.shape[1]


def check_mask(mask: torch.Tensor, seq_len: int) -> None:
    """Raise ValueError if a mask is not (B, seq_len), or has zeros between the ones of a row."""
    begins = F.pad(mask.long(), (1, 0)).diff(dim=1) > 0
    if mask.shape[1:] != (seq_len,) or bool((begins.sum(1) > 1).any()):
        raise ValueError(
            f"attention_mask must have a number for each of the {seq_len} tokens, and no gap between "
            "the tokens of a sequence; pad on the left or on the right"
        )
