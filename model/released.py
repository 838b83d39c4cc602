"""Folders with a config.json, read by the names of their weights: of the paper's released code, and exported ones.

Weights carry our names. The released CC variants keep a convolution over columns and a read vector, which fold into
one weight; there the variant is known by the names of its weights, an exported folder (`export.py`) names it. No code
in a folder is executed.
"""

from pathlib import Path

import torch

import configurator
from model import STEMS, model_class, weights
from model.keys import values_before
from model.residual import fold_column_conv

RENAMED = {"ddl_v_dim1_constant": "ddl_v_constant", "ddl_v_dim1_constant_value": "ddl_v_constant_value"}
# Options of the released code that no published run used, with the values that mean "off".
FIXED = {
    **dict.fromkeys(("use_k_shift", "use_v_shift", "use_output_gate", "using_groupnorm", "bias"), (False, None)),
    **dict.fromkeys(("q_activation", "k_activation", "v_activation"), (None, "none", "identity")),
    **{"dropout": (0, None), "rms_norm_eps": (1e-5, None), "ddl_state_dv_shortconv_causal": (False, None)},
    **{"mlp_hidden_mult": (None, 8 / 3)},
}
# What the transformers library writes into any config.json.
LIBRARY = set(
    "_name_or_path architectures auto_map model_type torch_dtype dtype transformers_version tie_word_embeddings "
    "use_cache bos_token_id eos_token_id pad_token_id is_decoder return_dict output_hidden_states "
    "output_attentions is_encoder_decoder chunk_size_feed_forward id2label label2id problem_type "
    "_attn_implementation_autoset max_position_embeddings".split()
)
STEM = "stem"  # the key by which an exported config.json names its variant


def stem_of(names) -> str:
    """The variant that has weights of these names."""
    names = set(names)
    if not any(".ddl_attn." in name for name in names):
        return "gpt-mha-rope"
    if not any(".compress." in name for name in names):
        return "DDL-vdim1-gpt-mha-rope"
    column = "" if any(name.endswith("compress.shortconv.weight") for name in names) else "-CC"
    return f"DDL-gpt-mha-rope{column}{'-EC' if 'input_embed.conv.weight' in names else ''}"


def read_config(released: dict, stem: str) -> dict:
    """The folder's config keys as ours. ValueError: an option that this code does not have, or an unknown key."""
    schema = configurator.knobs(model_class(stem).Config)
    anywhere = configurator.knobs(*(model_class(other).Config for other in STEMS))  # a flat config holds all keys
    renamed = {RENAMED.get(key, key): value for key, value in released.items()}
    config = configurator.check({key: value for key, value in renamed.items() if key in schema}, schema)
    fixed = {**FIXED, "intermediate_size": (None, 8 * config.get("hidden_size", schema["hidden_size"].default) // 3)}
    for key in renamed.keys() - schema.keys():
        if key in fixed:
            if renamed[key] not in fixed[key]:
                raise ValueError(
                    f"{key}={weights.clipped(renamed[key])} in the released config: only {fixed[key][0]!r} is supported"
                )
        elif key not in LIBRARY and key != STEM and key not in anywhere:
            raise ValueError(
                f"unknown key {weights.clipped(key)[1:-1]} in the released config{configurator.nearest(key, schema)}"
            )
    if "-CC" in stem and STEM not in released:
        # There the key is the width over columns, which is v by definition.
        config.pop("ddl_state_shortconv_kernel_size", None)
    return config


def describe(folder: Path) -> tuple[str, dict]:
    """(stem, model keys) of a folder. ValueError: missing, damaged, or unsupported."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: give a folder of the released model code, or an exported one")
    config = configurator.read_json(folder / "config.json")
    names = weights.header(folder).keys()
    if weights.EMBEDDING not in names:
        raise ValueError(f"{folder} has no {weights.EMBEDDING}: it is not of the released model code")
    stem = config.get(STEM) or stem_of(names)
    if not isinstance(stem, str):
        raise ValueError(f"{folder / 'config.json'}: {STEM}={weights.clipped(stem)}: needed the name of a variant")
    try:
        return stem, {**values_before(model_class(stem).Config), **read_config(config, stem)}
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error


def load(folder: str | Path):
    """The model of a folder, in evaluation mode. ValueError: missing, damaged, unsupported, or not fitting."""
    folder = Path(folder)
    return weights.read_model(folder, *describe(folder), fold)


def column_owners(names) -> list[str]:
    """Prefixes of the reads over columns: `transformer.h.0.compress.`, ..., `readout.`."""
    return [n.removesuffix("weight") for n in names if n.endswith(("compress.weight", "readout.weight"))]


def fold(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The pair of convolution and read vector of each CC read as one weight; other names as they are.

    ValueError: the two do not fit each other.
    """
    folded = dict(tensors)
    for owner in column_owners(tensors):
        if f"{owner}read" in folded:
            weight, read = tensors[f"{owner}weight"], folded.pop(f"{owner}read")
            if weight.ndim != 2 or read.shape != weight.shape[1:]:
                raise ValueError(f"{owner}read is {tuple(read.shape)}, {owner}weight {tuple(weight.shape)}: no pair")
            folded[f"{owner}weight"] = fold_column_conv(weight, read)
    return folded


def state_dict(model) -> dict[str, torch.Tensor]:
    """The weights under the released names: each CC read as weight and read = e_((v-1)//2), which folds to itself."""
    tensors = dict(model.state_dict())
    for owner in column_owners(tensors):
        columns = tensors[f"{owner}weight"].shape[1]
        tensors[f"{owner}read"] = torch.eye(columns)[(columns - 1) // 2].to(tensors[f"{owner}weight"])
    return tensors
