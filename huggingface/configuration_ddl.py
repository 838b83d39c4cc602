"""config.json of an exported model: the keys of its variant, all of them, beside those of
transformers.
"""

import dataclasses

from transformers import PreTrainedConfig

from .stem import Model


class DDLConfig(PreTrainedConfig):
    """Keys as in training; one that is left out has its default."""

    model_type = "ddl"
    attribute_map = {"max_position_embeddings": "block_size"}  # noqa: RUF012 (transformers' own form)
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __post_init__(self, **keys):
        super().__post_init__(
            **{**dataclasses.asdict(Model.Config()), "tie_word_embeddings": True, **keys}
        )

    def model_config(self):
        """The model's own Config. ValueError: a value out of range."""
        return Model.Config(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Model.Config)}
        )
