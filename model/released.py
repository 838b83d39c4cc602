"""Folders with a config.json, read by the names of their weights: of the paper's released code, and
exported ones.

The authors have two releases whose weights differ in names and shapes: the current one (commit
d1f7621) and an older one, whose names are ours. A folder that `export.py` wrote names its variant;
of a released one, names and shapes of the weights tell it. No code in a folder is executed.

Both releases keep a CC read as a pair of a convolution over columns and a vector. A pair stays one
(`ddl_cc_read=pair`), so that training goes on with what the authors train, and goes back as it
came. It is folded into one weight where the config says `ddl_cc_read=folded`.
"""

import re
from pathlib import Path

import torch

from model import check_settings, every_config, model_class, weights
from model.options import collect_options, legacy_defaults
from model.residual import fold_channel_conv
from utils import errors, files

# The release's file names as our stems; `-accelerated` computes the same with kernels of its own.
FILES = {
    "DDL-vdim1-gpt-mha-rope-TC": "DDL-vdim1-gpt-mha-rope",
    "DDL-gpt-mha-rope-TC": "DDL-gpt-mha-rope",
    "DDL-gpt-mha-rope-TC-EC": "DDL-gpt-mha-rope-EC",
    "DDL-gpt-mha-rope-CC": "DDL-gpt-mha-rope-CC",
    "DDL-gpt-mha-rope-CC-EC": "DDL-gpt-mha-rope-CC-EC",
}
VARIANTS = ("gpt-mha-rope", *FILES.values())
RENAMED = {
    "ddl_v_dim1_constant": "ddl_v_constant",
    "ddl_v_dim1_constant_value": "ddl_v_constant_value",
}
# `parameterization` of the release: whether it scales with depth, too. All scale logits by width.
WIDTH = dict.fromkeys(("widthmuP", "widthmup"), False)
WIDTH |= dict.fromkeys(("completeP", "completep", "spectralP", "SpectralP", "spectralp"), True)
# Options of the released code that no published run used, with the values that mean "off".
FIXED = {
    **dict.fromkeys(("use_k_shift", "use_v_shift", "use_output_gate"), (False, None)),
    **dict.fromkeys(("using_groupnorm", "bias", "add_cross_attention"), (False, None)),
    **dict.fromkeys(("q_activation", "k_activation", "v_activation"), (None, "none", "identity")),
    **{"dropout": (0, None), "rms_norm_eps": (1e-5, None), "mlp_hidden_mult": (None, 8 / 3)},
    **{"ddl_sequence_reduction_version": (1,), "attention_dtype": ("auto",)},
    **{"kv_cache_slot_size": (128, None), "validate_cached_position_ids": (False, None)},
    "scale_attn_by_inverse_layer_idx": (False, None),
}
# What the transformers library writes into any config.json.
LIBRARY = set(
    "_name_or_path architectures auto_map model_type torch_dtype dtype transformers_version "
    "tie_word_embeddings use_cache bos_token_id eos_token_id pad_token_id is_decoder return_dict output_hidden_states "
    "output_attentions is_encoder_decoder chunk_size_feed_forward id2label label2id problem_type "
    "_attn_implementation_autoset max_position_embeddings torchscript".split()
)
# Our keys that the release has as well, and those that it has under other keys or in the weights.
THEIRS = set(
    "vocab_size block_size num_hidden_layers num_attention_heads hidden_size head_dim rope_base "
    "rope_ratio use_qk_rmsnorm ddl_value_channels ddl_state_shortconv_kernel_size "
    "ddl_state_dv_shortconv_causal input_embed_shortconv_kernel_size ddl_k_eps "
    "ddl_beta_hidden_size ddl_beta_single_linear ddl_v_sigmoid ddl_v_sigmoid_scale "
    "ddl_v_constant ddl_v_constant_value".split()
)
MAPPED = set("mup hidden_size_base num_hidden_layers_base residual_branch_mult ddl_cc_read".split())
STEM = "stem"  # the key by which an exported config.json names its variant
OUTPUT = re.compile(r"(\.(?:attn|mlp)\.)(c_proj|o_proj)(\.weight)$")
READ = re.compile(r"^(transformer\.h\.\d+\.compress|readout)\.(shortconv\.weight|weight)$")
EXPANDER = re.compile(r"^(input_embed)\.(conv\.weight|weight)$")


# ---- names and shapes of the weights ----


def is_current(name: str, tensor) -> bool | None:
    """Whether a weight is as in the current release; None: both releases have it, or neither."""
    if match := OUTPUT.search(name):
        return match[2] == "o_proj"
    if match := EXPANDER.match(name):
        return match[2] == "weight"
    if (match := READ.match(name)) and (match[2] != "weight" or tensor.ndim == 3):
        return match[2] == "weight"
    return None  # a CC read looks the same in both


def of_current(found) -> bool:
    """Whether the weights found, {name: tensor}, are of the current release.

    ValueError: some are, others are of the older release.
    """
    kinds = {is_current(name, tensor): name for name, tensor in sorted(found.items())}
    if True in kinds and False in kinds:
        current = f"{kinds[True]} is a weight of the authors' current release"
        raise ValueError(f"{current}, {kinds[False]} of their older one: give the names of one")
    return True in kinds


def stem_of(found) -> str:
    """The variant that has weights of these names and shapes, {name: tensor}.

    ValueError: a read has neither the dimensions of CC nor of TC, or there are reads of both.
    """
    if not any(".ddl_attn." in name for name in found):
        return "gpt-mha-rope"
    reads = {name: match for name in sorted(found) if (match := READ.match(name))}
    if not reads:
        return "DDL-vdim1-gpt-mha-rope"
    for name, match in reads.items():
        if match[2] == "weight" and found[name].ndim not in (2, 3):
            shape = tuple(found[name].shape)
            raise ValueError(f"{name} is {shape}: needed two dimensions (CC) or three (TC)")
    kinds = {match[2] == "weight" and found[name].ndim == 2: name for name, match in reads.items()}
    if len(kinds) > 1:
        columns = f"{kinds[True]} is a read over columns (CC)"
        raise ValueError(f"{columns}, {kinds[False]} one over tokens (TC)")
    ending = "-EC" if any(EXPANDER.match(name) for name in found) else ""
    return f"DDL-gpt-mha-rope{'-CC' if True in kinds else ''}{ending}"


def column_owners(names) -> list[str]:
    """Prefixes of the reads over columns: `transformer.h.0.compress.`, ..., `readout.`."""
    reads = ("compress.weight", "readout.weight")
    return [name.removesuffix("weight") for name in names if name.endswith(reads)]


def ours(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of either release under our names and in our shapes.

    ValueError: they are of both releases, or the sizes d, v of a convolution (d, v, K) are not
    those of the embedding and the read vector: flattened, a transposed one would fit.
    """
    if not of_current(found):
        return dict(found)
    embedding, renamed = found.get(weights.EMBEDDING), {}
    if embedding is None or embedding.ndim != 2:
        raise ValueError(f"{weights.EMBEDDING} is missing, or has not two dimensions")
    width = embedding.shape[1]
    for name, tensor in found.items():
        short = OUTPUT.sub(r"\1c_proj\3", name)
        match = READ.match(name) or EXPANDER.match(name)
        if match and is_current(name, tensor):
            reader = "readout.read" if match[1] == "input_embed" else f"{match[1]}.read"
            if reader not in found:
                raise ValueError(f"{reader} is missing, {name} is there")
            if tensor.ndim != 3 or tensor.shape[:2] != (width, *found[reader].shape):
                needed = f"(d, v, K) with d={width} as in {weights.EMBEDDING}, v as in {reader}"
                shapes = f"{tuple(tensor.shape)}: needed {needed}"
                raise ValueError(f"{name} is {shapes}, which is {tuple(found[reader].shape)}")
            # torch's depthwise convolution (d*v, 1, K) in the expander; the read's lacks the axis
            if match[1] == "input_embed":
                short, tensor = "input_embed.conv.weight", tensor.flatten(0, 1).unsqueeze(1)
            else:
                short, tensor = f"{match[1]}.shortconv.weight", tensor.flatten(0, 1)
        renamed[short] = tensor
    return renamed


def fold(tensors: dict[str, torch.Tensor], model) -> dict[str, torch.Tensor]:
    """A folder's tensors as the model keeps them: under our names, each pair as it is, or folded
    where the model's read is one weight.

    ValueError: the tensors are of two releases, or the halves of a pair do not fit each other.
    """
    folded, own = ours(tensors), model.state_dict()
    for owner in column_owners(folded):
        if f"{owner}read" in folded and f"{owner}weight" in own:
            weight, read = folded[f"{owner}weight"], folded[f"{owner}read"]
            whole = f"{owner}read" not in own  # the model's weight is what the pair folds into
            columns = own[f"{owner}weight" if whole else f"{owner}read"].shape[-1]
            if weight.ndim != 2 or read.shape != (columns,) or weight.shape[1] > columns:
                halves = f"{owner}read is {tuple(read.shape)}, {owner}weight {tuple(weight.shape)}"
                raise ValueError(f"{halves}: no pair")
            if whole:
                folded[f"{owner}weight"] = fold_channel_conv(weight, folded.pop(f"{owner}read"))
    return folded


# ---- keys of the config ----


def scaled_as(released: dict) -> dict:
    """The config with `parameterization` as our keys.

    The release has depth scaling in completeP and spectralP alone; a base beside another
    parameterization does nothing there, and is left out.
    ValueError: a parameterization that the release does not know, or that another key contradicts.
    """
    config = dict(released)
    base = config.get("num_hidden_layers_base")
    if "parameterization" not in config:
        if STEM not in config and base is not None:
            given = f"num_hidden_layers_base={weights.shorten(base)} in the released config"
            fix = "parameterization=completeP or spectralP alone: give one of them, or leave it out"
            raise ValueError(f"{given}, where it has an effect with {fix}")
        return config
    name = config.pop("parameterization")
    if name is not None and not (isinstance(name, str) and name in WIDTH):
        given = f"parameterization={weights.shorten(name)} in the released config"
        known = "None, 'widthmuP', 'completeP' and 'spectralP'"
        raise ValueError(f"{given}: only {known} are supported")
    mup = config.setdefault("mup", name in WIDTH)
    if mup != (name in WIDTH):
        given = f"mup={weights.shorten(mup)} in the released config"
        raise ValueError(f"{given} contradicts parameterization={name!r}")
    config["mup"] = name in WIDTH
    if not WIDTH.get(name):
        config.pop("num_hidden_layers_base", None)
    return config


def read_config(released: dict, stem: str) -> dict:
    """The folder's config keys as ours.

    ValueError: an option that this code does not have, or an unknown key.
    """
    schema = collect_options(model_class(stem).Config)
    renamed = {RENAMED.get(key, key): value for key, value in scaled_as(released).items()}
    known = {key: value for key, value in renamed.items() if key in schema}
    config = check_settings(known, schema)
    inner = 8 * config.get("hidden_size", schema["hidden_size"].default) // 3
    fixed = {**FIXED, "intermediate_size": (None, inner)}
    for key in sorted((renamed.keys() - schema.keys()) & fixed.keys()):
        if renamed[key] not in fixed[key]:
            given = f"{key}={weights.shorten(renamed[key])} in the released config"
            raise ValueError(f"{given}: only {fixed[key][0]!r} is supported")
    others = renamed.keys() - schema.keys() - fixed.keys() - LIBRARY - {STEM}
    if others:  # a flat config holds the keys of all variants, which are looked up where needed
        others -= collect_options(*every_config()).keys()
    for key in sorted(others):
        given, nearest = weights.shorten(key)[1:-1], errors.suggest(key, schema)
        raise ValueError(f"unknown key {given} in the released config{nearest}")
    return config


def of_weights(found, stem: str, config: dict) -> dict:
    """Keys of a released folder's model that its weights settle, beside the config's."""
    current = of_current(found)
    keys = {"init": "spectral"} if current and "init" not in config else {}
    if "-CC" in stem:
        names = ("readout.weight", "readout.read")
        halves = [found[name] for name in names if name in found]
        form = config.get("ddl_cc_read") or ("pair" if current or len(halves) == 2 else "folded")
        keys |= {"ddl_cc_read": form, "ddl_state_shortconv_kernel_size": None}
        # Their kernel size has a default beside v, so that the weights are asked; None is v.
        if form == "pair" and [half.ndim for half in halves] == [2, 1]:
            taps, columns = halves[0].shape[1], halves[1].shape[0]
            keys["ddl_state_shortconv_kernel_size"] = None if taps == columns else taps
    return keys


def named_stem(config: dict):
    """What the config says its variant is, a file of the release by our stem; None: nothing."""
    for key in (STEM, "model_type", "architectures"):
        said = config.get(key)
        for name in said if isinstance(said, list) else [said]:
            file = name.removesuffix("-accelerated") if isinstance(name, str) else None
            if file in FILES:
                return FILES[file]
    return config.get(STEM)


def describe(folder: Path) -> tuple[str, dict]:
    """(stem, model keys) of a folder. ValueError: missing, damaged, or unsupported."""
    file = folder / "config.json"
    if not file.is_file():
        needed = "a folder of the released model code, or an exported one"
        raise ValueError(f"{folder} holds no config.json: give {needed}")
    config, found = files.read_json(file), weights.read_headers(folder)
    if weights.EMBEDDING not in found:
        reason = f"has no {weights.EMBEDDING}: it is not of the released model code"
        raise ValueError(f"{folder} {reason}")
    try:
        stem, current = named_stem(config) or stem_of(found), of_current(found)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if not isinstance(stem, str):
        given = f"{STEM}={weights.shorten(stem)}"
        raise ValueError(f"{file}: {given}: needed the name of a variant")
    try:
        keys = read_config(config, stem)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if config.get(STEM) != stem or current:  # not as export.py writes it
        keys |= of_weights(found, stem, keys)
    return stem, {**legacy_defaults(model_class(stem).Config), **keys}


def load(folder: str | Path):
    """A folder's model in evaluation mode. ValueError: missing, damaged, unsupported, or misfit."""
    folder = Path(folder)
    return weights.read_model(folder, *describe(folder), fold)


# ---- back to the authors' names ----


def config_of(model, older: bool = False) -> dict:
    """The model's config.json in the keys of the authors' current release, or of the older one.

    Keys of an initialisation are left out: the weights make them idle.
    ValueError: the release lacks the variant, or what a key of it does.
    """
    stem, config = model.variant.__module__.removeprefix("model."), model.config
    release = f"the authors' {'older' if older else 'current'} release"
    if stem not in VARIANTS:
        raise ValueError(f"model={stem!r}: {release} has no such variant")
    written, knobs, keys = {}, collect_options(type(config)), collect_options(type(config))
    for name, value in vars(config).items():
        idle = name in MAPPED or keys[name].initial or keys[name].free
        if name in THEIRS:
            written[name] = value
        elif not idle and value != knobs[name].default:
            raise ValueError(f"{name}={value!r}: {release} has no such key")
    written |= depth_and_width(config, older, release)
    if stem == FILES["DDL-vdim1-gpt-mha-rope-TC"]:
        del written["ddl_value_channels"]
        for theirs, name in RENAMED.items():
            written[theirs] = written.pop(name)
    elif stem != "gpt-mha-rope":
        written |= sizes_of_reads(config, "-CC" in stem, older, release)
    return written


def sizes_of_reads(config, over_columns: bool, older: bool, release: str) -> dict:
    """The release's key of the reads' kernel. ValueError: it has no such read."""
    columns, name = config.ddl_value_channels, "ddl_state_shortconv_kernel_size"
    kernel_size = getattr(config, name) or (columns if over_columns else 4)
    if columns == 1:
        raise ValueError(f"ddl_value_channels=1: {release} has no such read")
    if older and over_columns:
        if kernel_size != columns:
            raise ValueError(f"{name}={kernel_size}: {release} has no such read")
        if config.ddl_state_dv_shortconv_causal:
            raise ValueError(f"ddl_state_dv_shortconv_causal=True: {release} has no such read")
    return {name: kernel_size}


def depth_and_width(config, older: bool, release: str) -> dict:
    """The release's keys for muP and depth scaling. ValueError: it has no depth scaling."""
    base, mult = config.num_hidden_layers_base, config.residual_branch_mult
    if older and config.branch_mult != 1:
        name = "num_hidden_layers_base" if mult is None else "residual_branch_mult"
        raise ValueError(f"{name}={getattr(config, name)!r}: {release} has no such key")
    width = {"hidden_size_base": config.hidden_size_base}
    if older:
        return {"mup": config.mup, **width}
    if config.mup and base is not None:
        keys = {"parameterization": "completeP", **width, "num_hidden_layers_base": base}
        return keys if mult is None else {**keys, "residual_branch_mult": mult}
    # Without muP's logits the factor stands by itself: a base sets the start of matrices besides.
    keys = {"parameterization": "widthmuP", **width} if config.mup else {}
    return {**keys, "residual_branch_mult": config.branch_mult} if config.branch_mult != 1 else keys


def state_dict(model, older: bool = False) -> dict[str, torch.Tensor]:
    """The weights under the names of the authors' current release, or of the older one.

    A CC read that is one weight goes out as weight and read = e_((v-1)//2), which folds to itself.
    ValueError: the release lacks the variant, or what a key of it does.
    """
    config_of(model, older)  # refuses
    written, tensors = {}, dict(model.state_dict())
    columns = getattr(model.config, "ddl_value_channels", 1)
    for owner in column_owners(tensors):
        if f"{owner}read" not in tensors:
            middle = torch.eye(columns)[(columns - 1) // 2]
            tensors[f"{owner}read"] = middle.to(tensors[f"{owner}weight"])
    if older:
        return tensors
    for name, tensor in tensors.items():
        match = READ.match(name) or EXPANDER.match(name)
        if match and match[2] != "weight":
            taps = tensor.unflatten(0, (-1, columns))  # (d, v, K), of the expander (d, v, 1, K)
            written[f"{match[1]}.weight"] = taps.flatten(2)
        else:
            written[OUTPUT.sub(r"\1o_proj\3", name)] = tensor
    return written
