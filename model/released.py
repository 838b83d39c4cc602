"""Checkpoints of the paper's released model code, read by name and written back.

A released folder holds config.json and model.safetensors (or pytorch_model.bin, read without executing anything in
it). Weights carry our names; the CC variants keep a convolution over columns and a read vector, which fold into one
weight. The variant is known by the names of its weights.
"""

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import configurator
from model import STEMS, build, model_class
from model.gpt import at_least_fp32
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
    "output_attentions".split()
)


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
    """The released config's keys as ours. ValueError: an option that this code does not have, or an unknown key."""
    schema = configurator.knobs(model_class(stem).Config)
    anywhere = configurator.knobs(*(model_class(other).Config for other in STEMS))  # a flat config holds all keys
    width = 8 * released.get("hidden_size", schema["hidden_size"].default) // 3
    fixed = {**FIXED, "intermediate_size": (None, width)}
    config = {}
    for key, value in released.items():
        key = RENAMED.get(key, key)
        if key in fixed:
            if value not in fixed[key]:
                raise ValueError(f"{key}={value!r} in the released config: only {fixed[key][0]!r} is supported")
        elif key in schema:
            config[key] = value
        elif key not in LIBRARY and key not in anywhere:
            raise ValueError(f"unknown key {key} in the released config{configurator.nearest(key, schema)}")
    if "-CC" in stem:
        # There the key is the width over columns, which is v by definition.
        config.pop("ddl_state_shortconv_kernel_size", None)
    return configurator.check(config, schema)


def load(folder: str | Path):
    """The model of a released folder, in evaluation mode. ValueError: missing, unsupported, or not fitting names."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: give a folder of the released model code")
    weights = load_weights(folder)
    if "transformer.wte.weight" not in weights:
        raise ValueError(f"{folder} has no transformer.wte.weight: it is not of the released model code")
    stem = stem_of(weights)
    released = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = build(stem, **read_config(released, stem))
    expected = model.state_dict()
    weights = {**fold(weights), "lm_head.weight": weights["transformer.wte.weight"]}
    wrong = sorted(weights.keys() ^ expected.keys()) + sorted(
        name for name in weights.keys() & expected.keys() if weights[name].shape != expected[name].shape
    )
    if wrong:
        raise ValueError(f"{folder} does not fit {stem}: {wrong[0]}")
    model.load_state_dict(weights)
    return model.eval()


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's tensors in at least fp32. ValueError: no file, or a damaged one."""
    try:
        if (folder / "model.safetensors").is_file():
            weights = load_file(folder / "model.safetensors")
        elif (folder / "pytorch_model.bin").is_file():
            weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        else:
            raise ValueError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"the weights in {folder} are damaged: {error}") from error
    return {name: value.to(at_least_fp32(value.dtype)) for name, value in weights.items()}


def column_owners(names) -> list[str]:
    """Prefixes of the reads over columns: `transformer.h.0.compress.`, ..., `readout.`."""
    return [n.removesuffix("weight") for n in names if n.endswith(("compress.weight", "readout.weight"))]


def fold(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The pair of convolution and read vector of each CC read as one weight; other names as they are."""
    folded = dict(weights)
    for owner in column_owners(weights):
        if f"{owner}read" in folded:
            folded[f"{owner}weight"] = fold_column_conv(weights[f"{owner}weight"], folded.pop(f"{owner}read"))
    return folded


def state_dict(model) -> dict[str, torch.Tensor]:
    """The weights under the released names: each CC read as weight and read = e_((v-1)//2), which folds to itself."""
    weights = dict(model.state_dict())
    for owner in column_owners(weights):
        columns = weights[f"{owner}weight"].shape[1]
        weights[f"{owner}read"] = torch.eye(columns)[(columns - 1) // 2].to(weights[f"{owner}weight"])
    return weights
