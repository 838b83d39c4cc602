"""The trained model as transformers knows models; what it computes is in gpt.py and stem.py beside
this file.

from_pretrained(FOLDER, trust_remote_code=True), generate() with batches, sampling and beams, and
fine-tuning.
"""

import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_ddl import DDLConfig
from .decoding import NO_TOKEN
from .gpt import at_least_fp32
from .parameters import aliases
from .stem import Model

NOT_OFFERED = (
    "inputs_embeds position_ids output_attentions output_hidden_states token_type_ids".split()
)


class GenerationCache:
    """The model's cache as generate() handles one."""

    is_compileable = False

    def __init__(self, cache):
        self.cache = cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.num_tokens

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.cache.length

    def reorder_cache(self, beam_idx) -> None:
        self.cache = self.cache.select(beam_idx)

    def batch_select_indices(self, indices) -> None:
        self.cache = self.cache.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(len(self.cache.start), device=self.cache.start.device)
        self.cache = self.cache.select(rows.repeat_interleave(repeats))


class DDLForCausalLM(PreTrainedModel, GenerationMixin):
    """logits (B, T, vocab_size) in at least fp32; with labels, the loss of the next tokens."""

    config_class = DDLConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True  # the cache cannot go back, as assisted generation would have it

    def __init__(self, config: DDLConfig):
        super().__init__(config)
        gpt = Model(config.model_config())
        # The parts become this module's own, so that weights keep their names; the whole stays out
        # of registration.
        for name, part in gpt.named_children():
            setattr(self, name, part)
        object.__setattr__(self, "gpt", gpt)
        self._tied_weights_keys = aliases(gpt)
        self.gradient_checkpointing = False
        self._no_split_modules = [type(gpt.transformer.h[0]).__name__]
        self.post_init()

    def _init_weights(self, module):
        """The model has initialised itself; while a file is loaded, only what it lacks arrives
        here.
        """
        weights = dict(self.named_parameters())
        lacking = [
            name
            for name, weight in weights.items()
            if not getattr(weight, "_is_hf_initialized", False)
        ]
        if len(lacking) < len(weights):
            own = {id(weight) for weight in module.parameters(recurse=False)}
            for name in lacking:
                if id(weights[name]) in own:
                    raise ValueError(f"the file of weights lacks {name}")

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.place_rope()
        return self

    def place_rope(self) -> None:
        """The tables are no weights: after loading, and where the weights have moved, they are
        computed anew.
        """
        weight, cos = self.transformer.wte.weight, self.gpt.rope_cos
        if (cos.device, cos.dtype) != (weight.device, at_least_fp32(weight.dtype)):
            self.gpt.reset_rope()

    def get_input_embeddings(self):
        return self.transformer.wte

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, new_embeddings):
        raise ValueError("the output layer of this model cannot be replaced")

    def resize_token_embeddings(self, *args, **kwargs):
        raise ValueError(
            "the vocabulary of this model cannot be resized: unused ids follow the tokenizer's"
        )

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values: GenerationCache | None = None,
        labels=None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **kwargs,
    ):
        """input_ids int64 (B, T); attention_mask (B, tokens so far), 0 on the left of shorter rows
        (or, without a cache, on the right); labels (B, T), -100 where nothing is to be learned.

        With `use_cache=True` or given past_key_values nothing but the output layer has a gradient.
        ValueError: more tokens than block_size, a mask with gaps, or an argument that this model
        does not offer.
        """
        for name in NOT_OFFERED:
            given = kwargs.pop(name, None)
            if given is not None and given is not False:
                raise ValueError(f"{name} is not offered by this model: leave it out")
        if input_ids is None:
            raise ValueError("input_ids are missing")
        self.place_rope()
        self.gpt.activation_checkpointing = self.gradient_checkpointing and self.training
        if past_key_values is None and use_cache:
            past_key_values = self.new_cache()
        if past_key_values is None:
            hidden = self.hidden(input_ids, attention_mask)
        else:
            hidden = self.hidden_with(past_key_values.cache, input_ids, attention_mask)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.gpt.logits(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return output if return_dict is not False else output.to_tuple()

    def hidden(self, ids, mask):
        """The normed readout (B, T, d) without a cache.

        Padding on the left goes to the right, where nobody looks.
        """
        if ids.shape[1] > self.config.block_size:
            raise ValueError(
                f"{ids.shape[1]} tokens do not fit block_size={self.config.block_size}: give fewer"
            )
        if mask is None:
            return self.gpt.hidden(ids)
        check_mask(mask, ids.shape[1])
        # (T,), (B, 1)
        positions, padding = torch.arange(ids.shape[1], device=ids.device), left_padding(mask)
        moved = ids.gather(1, (positions + padding) % ids.shape[1])
        back = (positions - padding) % ids.shape[1]
        return self.gpt.hidden(moved).take_along_dim(back.unsqueeze(-1), 1)

    @torch.no_grad()
    def hidden_with(self, cache, ids, mask):
        """The normed readout (B, T, d) of tokens that follow those in the cache."""
        if mask is not None and cache.num_tokens == 0:
            check_mask(mask, ids.shape[1])
            positions = torch.arange(ids.shape[1], device=ids.device)
            if not mask[:, -1].all():
                raise ValueError("attention_mask: with a cache rows end together; pad on the left")
            ids = ids.masked_fill(positions < left_padding(mask), NO_TOKEN)
        elif mask is not None and not mask[:, cache.num_tokens :].all():
            raise ValueError("attention_mask: tokens that follow a cache cannot be masked")
        return self.gpt.hidden(ids, cache, cache.reserve(ids))

    def new_cache(self, length: int | None = None) -> GenerationCache:
        """An empty cache of at most `length` tokens, by default block_size."""
        self.place_rope()
        return GenerationCache(self.gpt.new_cache(length))

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """generate() asks for its cache here: as long as this call needs, or as any if the caller
        gets it back.
        """
        if generation_config.cache_implementation is not None:
            raise ValueError(
                "cache_implementation: this model has a cache of its own, leave the key out"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache:
            returned = generation_config.return_dict_in_generate
            length = None if returned else min(max_cache_length, self.config.block_size)
            model_kwargs["past_key_values"] = self.new_cache(length)


def left_padding(mask):
    """Zeros before each row's first one, (B, 1)."""
    return (mask.cumsum(1) == 0).sum(1, keepdim=True) % mask.shape[1]


def check_mask(mask, tokens: int) -> None:
    """ValueError: not one number per token, or a row whose ones are not one run."""
    if mask.shape[1:] != (tokens,):
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}: needed one number for each of {tokens} tokens"
        )
    begins = F.pad(mask.long(), (1, 0)).diff(dim=1) > 0
    if bool((begins.sum(1) > 1).any()):
        raise ValueError(
            "attention_mask has a gap between a row's tokens: pad on the left or on the right"
        )
