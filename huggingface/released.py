"""Read folders with a config.json: models that the paper's authors have released, and exported ones.

The authors have two releases, whose weights differ in names and shapes: the current one (commit
d1f7621), and an older one, whose names are those of this repository. The folder that export.py
writes names its variant; for a released folder, the variant follows from the names and shapes of
the weights. No code in a folder is executed.

Both releases store a CC read as a pair: a convolution over the columns of the state, and a vector
that reads the result. The model keeps the pair (`ddl_cc_read=pair`), so that training continues
with the parameters that the authors train. If the config says `ddl_cc_read=folded`, the pair is
folded into the one weight that computes the same.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch

from configurator import collect_options
from model import check_settings, every_config, model_class, weights
from model.gpt import GPT
from model.residual import fold_channel_conv
from utils import errors, files

# The release's model files, and the variants of this repository that compute the same. The files
# named NAME-accelerated compute the same as NAME, with the authors' kernels.
VARIANT_OF_FILE = {
    "DDL-vdim1-gpt-mha-rope-TC": "DDL-vdim1-gpt-mha-rope",
    "DDL-gpt-mha-rope-TC": "DDL-gpt-mha-rope",
    "DDL-gpt-mha-rope-TC-EC": "DDL-gpt-mha-rope-EC",
    "DDL-gpt-mha-rope-CC": "DDL-gpt-mha-rope-CC",
    "DDL-gpt-mha-rope-CC-EC": "DDL-gpt-mha-rope-CC-EC",
}

# Keys of the release that have another name here.
RENAMED_KEYS = {
    "ddl_v_dim1_constant": "ddl_v_constant",
    "ddl_v_dim1_constant_value": "ddl_v_constant_value",
}

# Values of the release's key `parameterization`. Each of them is muP; the value here says whether
# it also scales the residual branches by depth.
SCALES_WITH_DEPTH = {
    "widthmuP": False,
    "widthmup": False,
    "completeP": True,
    "completep": True,
    "spectralP": True,
    "SpectralP": True,
    "spectralp": True,
}

# Options of the released code that no published run uses. Only these values are supported, with
# which they have no effect.
SUPPORTED_VALUES = {
    "use_k_shift": (False, None),
    "use_v_shift": (False, None),
    "use_output_gate": (False, None),
    "using_groupnorm": (False, None),
    "bias": (False, None),
    "add_cross_attention": (False, None),
    "q_activation": (None, "none", "identity"),
    "k_activation": (None, "none", "identity"),
    "v_activation": (None, "none", "identity"),
    "dropout": (0, None),
    "rms_norm_eps": (1e-5, None),
    "mlp_hidden_mult": (None, 8 / 3),
    "ddl_sequence_reduction_version": (1,),
    "attention_dtype": ("auto",),
    "kv_cache_slot_size": (128, None),
    "validate_cached_position_ids": (False, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
}

# Keys that transformers writes into every config.json.
TRANSFORMERS_KEYS = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "max_position_embeddings",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "tie_word_embeddings",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_cache",
}

STEM = "stem"  # the key by which an exported config.json names its variant

# An output projection: c_proj in the older release, o_proj in the current one.
OUTPUT = re.compile(r"(\.(?:attn|mlp)\.)(?P<projection>c_proj|o_proj)(\.weight)$")
# The convolution of a read: shortconv.weight (d*v, K) in the older release, weight (d, v, K) in the
# current one. Over columns (CC) it is weight (d, K) in both.
READ = re.compile(
    r"^(?P<owner>transformer\.h\.\d+\.compress|readout)\.(?P<weight>shortconv\.weight|weight)$"
)
# The convolution of the expander: conv.weight (d*v, 1, K) in the older release, weight (d, v, K) in
# the current one.
EXPANDER = re.compile(r"^(?P<owner>input_embed)\.(?P<weight>conv\.weight|weight)$")

Tensors = dict[str, torch.Tensor]


# ---- names and shapes of the weights ----


def detect_release(name: str, tensor: torch.Tensor) -> Literal["current", "older"] | None:
    """Return the release that has this weight; None if both have it, or neither."""
    if match := OUTPUT.search(name):
        return "current" if match["projection"] == "o_proj" else "older"
    if match := EXPANDER.match(name):
        return "current" if match["weight"] == "weight" else "older"
    match = READ.match(name)
    if match is None:
        return None
    if match["weight"] == "shortconv.weight":
        return "older"
    # two dimensions: a read over columns, which is the same in both releases
    return "current" if tensor.ndim == 3 else None


def is_current_release(tensors: Tensors) -> bool:
    """Return whether the weights are of the current release. Tensors on the meta device suffice.

    Raises:
        ValueError: some are of the current release, and others of the older one
    """
    name_by_release = {
        detect_release(name, tensor): name for name, tensor in sorted(tensors.items())
    }
    if "current" in name_by_release and "older" in name_by_release:
        raise ValueError(
            f"{name_by_release['current']} is a weight of the authors' current release, and "
            f"{name_by_release['older']} of their older one; name all weights as one release does"
        )
    return "current" in name_by_release


def detect_variant(tensors: Tensors) -> str:
    """Return the variant that has weights of these names and shapes.

    Raises:
        ValueError: a read has neither the shape of CC nor that of TC, or there are reads of both
    """
    if not any(".ddl_attn." in name for name in tensors):
        return "gpt-mha-rope"
    name_of_read = {}  # by whether it reads over columns (CC) or over tokens (TC)
    for name in sorted(tensors):
        match = READ.match(name)
        if match is None:
            continue
        num_dims = tensors[name].ndim
        if match["weight"] == "weight" and num_dims not in (2, 3):
            raise ValueError(
                f"{name} has the shape {tuple(tensors[name].shape)}, but a read has two dimensions "
                "(CC) or three (TC)"
            )
        over_columns = match["weight"] == "weight" and num_dims == 2
        name_of_read[over_columns] = name
    if not name_of_read:
        return "DDL-vdim1-gpt-mha-rope"
    if len(name_of_read) == 2:
        raise ValueError(
            f"{name_of_read[True]} is a read over columns (CC), but {name_of_read[False]} is one "
            "over tokens (TC)"
        )
    variant = "DDL-gpt-mha-rope-CC" if True in name_of_read else "DDL-gpt-mha-rope"
    if any(EXPANDER.match(name) for name in tensors):
        variant += "-EC"
    return variant


def find_column_reads(names: Iterable[str]) -> list[str]:
    """Return the prefixes of reads of one weight: `transformer.h.0.compress.`, ..., `readout.`."""
    endings = ("compress.weight", "readout.weight")
    return [name.removesuffix("weight") for name in names if name.endswith(endings)]


def rename_weights(tensors: Tensors) -> Tensors:
    """Return the weights of either release under the names and in the shapes of this repository.

    Raises:
        ValueError: they are of both releases, or a convolution (d, v, K) has other sizes d and v
            than the embedding and the read vector
    """
    if not is_current_release(tensors):
        return dict(tensors)
    embedding = tensors.get(weights.EMBEDDING)
    if embedding is None or embedding.ndim != 2:
        raise ValueError(f"{weights.EMBEDDING} is missing, or does not have two dimensions")
    hidden_size = embedding.shape[1]
    renamed = {}
    for name, tensor in tensors.items():
        match = READ.match(name) or EXPANDER.match(name)
        if match is None or detect_release(name, tensor) != "current":
            renamed[OUTPUT.sub(r"\1c_proj\3", name)] = tensor
            continue
        owner = match["owner"]
        check_convolution(name, tensor, owner, tensors, hidden_size)
        # torch's depthwise convolution has the shape (d*v, 1, K); that of a read lacks the 1
        flat = tensor.flatten(0, 1)
        if owner == "input_embed":
            renamed["input_embed.conv.weight"] = flat.unsqueeze(1)
        else:
            renamed[f"{owner}.shortconv.weight"] = flat
    return renamed


def check_convolution(
    name: str, tensor: torch.Tensor, owner: str, tensors: Tensors, hidden_size: int
) -> None:
    """Raise ValueError if a convolution of the current release does not have the shape (d, v, K).

    Its first two dimensions are about to be flattened, after which a transposed tensor would fit.
    """
    # all reads have the same number of columns, so the expander is compared with the readout
    read_name = "readout.read" if owner == "input_embed" else f"{owner}.read"
    if read_name not in tensors:
        raise ValueError(f"{read_name} is missing, but there is {name}")
    read = tensors[read_name]
    if tensor.ndim != 3 or tensor.shape[:2] != (hidden_size, *read.shape):
        raise ValueError(
            f"{name} has the shape {tuple(tensor.shape)}, expected (d, v, K) with d={hidden_size} "
            f"as in {weights.EMBEDDING} and v as in {read_name}, which has the shape "
            f"{tuple(read.shape)}"
        )


def convert_weights(tensors: Tensors, model: GPT) -> Tensors:
    """Rename a folder's tensors to the model's names, and fold CC reads if the model's are folded.

    Raises:
        ValueError: the tensors are of two releases, or the two tensors of a pair do not fit
    """
    converted = rename_weights(tensors)
    expected = model.state_dict()
    for prefix in find_column_reads(converted):
        weight_name = f"{prefix}weight"
        read_name = f"{prefix}read"
        if read_name not in converted or weight_name not in expected:
            continue
        keeps_pair = read_name in expected
        weight = converted[weight_name]
        read = converted[read_name]
        value_channels = expected[read_name if keeps_pair else weight_name].shape[-1]
        if weight.ndim != 2 or read.shape != (value_channels,) or weight.shape[1] > value_channels:
            raise ValueError(
                f"{weight_name} {tuple(weight.shape)} and {read_name} {tuple(read.shape)} do not "
                f"form a pair, which has the shapes (d, K) and (d_v,) with K at most d_v={value_channels}"
            )
        if not keeps_pair:
            converted[weight_name] = fold_channel_conv(weight, converted.pop(read_name))
    return converted


# ---- keys of config.json ----


def convert_parameterization(released_config: dict) -> dict:
    """Return the config with the keys `mup` and `num_hidden_layers_base` for `parameterization`.

    Raises:
        ValueError: the release has no such parameterization, or another key contradicts it
    """
    config = dict(released_config)
    if "parameterization" not in config:
        base = config.get("num_hidden_layers_base")
        if STEM not in config and base is not None:
            raise ValueError(
                f"num_hidden_layers_base={weights.shorten(base)} in the released config has an "
                "effect only with parameterization=completeP or spectralP; give one of them, or "
                "omit the key"
            )
        return config
    name = config.pop("parameterization")
    if name is not None and not (isinstance(name, str) and name in SCALES_WITH_DEPTH):
        raise ValueError(
            f"parameterization={weights.shorten(name)} in the released config: only None, "
            "'widthmuP', 'completeP' and 'spectralP' are supported"
        )
    uses_mup = name in SCALES_WITH_DEPTH
    if "mup" in config and config["mup"] != uses_mup:
        raise ValueError(
            f"mup={weights.shorten(config['mup'])} in the released config contradicts "
            f"parameterization={name!r}; omit one of them"
        )
    config["mup"] = uses_mup
    # the released code ignores the base with any other parameterization
    if not SCALES_WITH_DEPTH.get(name):
        config.pop("num_hidden_layers_base", None)
    return config


def read_model_settings(released_config: dict, variant: str) -> dict[str, object]:
    """Return the settings of the variant that a config.json has, under the names of this repository.

    Raises:
        ValueError: an unknown key, or an option of the released code that is not supported
    """
    options = collect_options(model_class(variant).Config)
    config = {
        RENAMED_KEYS.get(key, key): value
        for key, value in convert_parameterization(released_config).items()
    }
    settings = check_settings(
        {key: value for key, value in config.items() if key in options}, options
    )
    hidden_size = settings.get("hidden_size", options["hidden_size"].default)
    supported_values = {**SUPPORTED_VALUES, "intermediate_size": (None, 8 * hidden_size // 3)}
    other_keys = config.keys() - options.keys()
    for key in sorted(other_keys & supported_values.keys()):
        if config[key] not in supported_values[key]:
            supported = " or ".join(map(repr, supported_values[key]))
            raise ValueError(
                f"{key}={weights.shorten(config[key])} in the released config: only {supported} is "
                "supported"
            )
    unknown_keys = other_keys - supported_values.keys() - TRANSFORMERS_KEYS - {STEM}
    if unknown_keys:
        # a config of the release has the keys of all variants, whose files are only now imported
        unknown_keys -= collect_options(*every_config()).keys()
    for key in sorted(unknown_keys):
        shown_key = weights.shorten(key)[1:-1]  # without quotes
        raise ValueError(
            f"unknown key {shown_key} in the released config{errors.suggest(key, options)}"
        )
    return settings


def derive_settings(
    tensors: Tensors, variant: str, settings: dict[str, object]
) -> dict[str, object]:
    """Return the settings of a released model that follow from its weights, not from its config."""
    is_current = is_current_release(tensors)
    derived: dict[str, object] = {}
    if "init" not in settings:
        derived["init"] = "spectral" if is_current else "normal"
    if "-CC" not in variant:
        return derived
    weight = tensors.get("readout.weight")
    read = tensors.get("readout.read")
    has_pair = weight is not None and read is not None
    cc_read = settings.get("ddl_cc_read") or ("pair" if is_current or has_pair else "folded")
    derived["ddl_cc_read"] = cc_read
    derived["ddl_state_shortconv_kernel_size"] = None  # as many taps as columns
    # The config cannot tell the kernel size: its default there is 4, whatever the weights have.
    if cc_read == "pair" and has_pair and weight.ndim == 2 and read.ndim == 1:
        num_taps = weight.shape[1]
        value_channels = read.shape[0]
        if num_taps != value_channels:
            derived["ddl_state_shortconv_kernel_size"] = num_taps
    return derived


def read_variant(config: dict) -> object:
    """Return the variant that a config names, as it is or by a file of the release; else None."""
    for key in (STEM, "model_type", "architectures"):
        value = config.get(key)
        for name in value if isinstance(value, list) else [value]:
            file = name.removesuffix("-accelerated") if isinstance(name, str) else None
            if file in VARIANT_OF_FILE:
                return VARIANT_OF_FILE[file]
    return config.get(STEM)


def describe(folder: Path) -> tuple[str, dict[str, object]]:
    """Return the variant of a released or exported folder, and the settings of its model.

    Raises:
        ValueError: the folder is missing, damaged, or has something that is not supported
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(
            f"{folder} holds no config.json; give an exported folder, or one of the authors' "
            "released models"
        )
    config = files.read_json(config_file)
    tensors = weights.read_headers(folder)
    if weights.EMBEDDING not in tensors:
        raise ValueError(
            f"{folder} has no {weights.EMBEDDING}, so it is not a model of the released code"
        )
    try:
        variant = read_variant(config) or detect_variant(tensors)
        is_current = is_current_release(tensors)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if not isinstance(variant, str):
        raise ValueError(
            f"{config_file}: {STEM}={weights.shorten(variant)} is not the name of a model variant"
        )
    try:
        settings = read_model_settings(config, variant)
    except ValueError as error:
        raise ValueError(f"{config_file}: {error}") from error
    derived = {}
    # an exported folder names its variant, and its config has every key
    if config.get(STEM) != variant or is_current:
        derived = derive_settings(tensors, variant, settings)
    return variant, {
        # lowest precedence first
        **settings,
        **derived,
    }


def load(folder: str | Path) -> GPT:
    """Load the model of a released or exported folder, in evaluation mode, on the CPU.

    Raises:
        ValueError: the folder is missing, damaged or unsupported, or its weights do not fit
    """
    folder = Path(folder)
    variant, settings = describe(folder)
    return weights.read_model(folder, variant, settings, convert_weights)
