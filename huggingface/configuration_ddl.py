"""The configuration of an exported model: all keys of its variant, beside those of transformers."""

import dataclasses

from transformers import PreTrainedConfig

from .gpt import GPTConfig
from .stem import Model


class DDLConfig(PreTrainedConfig):
    """The keys of the model as in training; an omitted key has its default."""

    model_type = "ddl"
    # transformers declares these two as plain class attributes
    attribute_map = {"max_position_embeddings": "block_size"}  # noqa: RUF012
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    def __post_init__(self, **keys):
        defaults = dataclasses.asdict(Model.Config())
        super().__post_init__(**{**defaults, "tie_word_embeddings": True, **keys})

    def model_config(self) -> GPTConfig:
        """Return the Config of the model itself.

        Raises:
            ValueError: a value is out of range
        """
        names = [field.name for field in dataclasses.fields(Model.Config)]
        return Model.Config(**{name: getattr(self, name) for name in names})
