"""Read folders with a config.json: models that the paper's authors have released, and exported ones.

The authors have two releases. The older one names its weights as this repository does; those of the
current one (commit d1f7621) are renamed by `RENAMED_WEIGHTS`. The folder that export.py writes names
its variant; for a released folder, the variant follows from the names and shapes of the weights. No
code in a folder is executed.
"""

from pathlib import Path

from configurator import collect_options
from model import check_settings, model_class, weights
from model.ddl import fold_channel_conv
from model.gpt import GPT
from model.weights import Tensors
from utils import files

# Endings of names in the current release, and what they are here. A convolution over tokens has the
# shape (d, v, K) there, and (dv, K) here, or (dv, 1, K) in input_embed. A convolution over columns
# (CC) has the same name and shape in both.
RENAMED_WEIGHTS = {
    "attn.o_proj.weight": "attn.c_proj.weight",
    "mlp.o_proj.weight": "mlp.c_proj.weight",
    "compress.weight": "compress.shortconv.weight",
    "readout.weight": "readout.shortconv.weight",
    "input_embed.weight": "input_embed.conv.weight",
}

# Keys of the older release that have another name here.
RENAMED_KEYS = {
    "ddl_v_dim1_constant": "ddl_v_constant",
    "ddl_v_dim1_constant_value": "ddl_v_constant_value",
}

# Values of the current release's key `parameterization`, in lower case. Each of them is muP; the
# latter two also scale the residual branches by depth.
WIDTH_SCALING = ("widthmup",)
DEPTH_SCALING = ("completep", "spectralp")

# The form of the authors' code where it differs from the paper's text: what a folder of theirs means
# that does not name these keys. The keys of other variants have no effect.
FORM_OF_RELEASED_CODE = {
    "ddl_v_sigmoid": True,
    "ddl_v_sigmoid_scale": 4.0,
    "ddl_v_bias": True,
    "ddl_cc_read": "pair",
    "state_dtype": "float32",
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


def convert_weights(tensors: Tensors, model: GPT) -> Tensors:
    """Return the tensors of a folder under the names and in the shapes of the model.

    What does not fit stays as it is, and is refused when the tensors are compared with the model.
    """
    expected = model.state_dict()
    converted = {}
    for name, tensor in tensors.items():
        new_name = rename_weight(name)
        if new_name not in expected or new_name in tensors:
            converted[name] = tensor
            continue
        shape = expected[new_name].shape
        # (d, v, K); without this comparison, a transposed tensor would fit as well
        hidden_size = model.config.hidden_size
        if tensor.shape == (hidden_size, shape[0] // hidden_size, shape[-1]):
            tensor = tensor.reshape(shape)
        converted[new_name] = tensor
    # with ddl_cc_read=folded, the model has one weight that computes the same as the pair of a folder
    for name in expected.keys() & converted.keys():
        read_name = f"{name.removesuffix('weight')}read"
        if read_name in expected or read_name not in converted:
            continue
        weight = converted[name]
        read = converted[read_name]
        is_pair = weight.ndim == 2 and read.ndim == 1 and read.shape == expected[name].shape[1:]
        if is_pair and 1 <= weight.shape[1] <= len(read):
            converted[name] = fold_channel_conv(weight, converted.pop(read_name))
    return converted


def rename_weight(name: str) -> str:
    """Return the name that a weight of the current release has here."""
    for ending, new_ending in RENAMED_WEIGHTS.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + new_ending
    return name


def detect_variant(tensors: Tensors) -> str:
    """Return the variant that has weights of these names and shapes."""
    if not any(".ddl_attn." in name for name in tensors):
        return "gpt-mha-rope"
    if not any(name.startswith("readout.") for name in tensors):
        return "DDL-vdim1-gpt-mha-rope"
    variant = "DDL-gpt-mha-rope"
    # a convolution over columns (CC) has two dimensions, one over tokens three or another name
    if "readout.weight" in tensors and tensors["readout.weight"].ndim == 2:
        variant += "-CC"
    if any(name.startswith("input_embed.") for name in tensors):
        variant += "-EC"
    return variant


def read_settings(config: dict, variant: str) -> dict[str, object]:
    """Return the settings of the variant that a config.json has, under the names of this repository.

    Keys of transformers, of other variants and of nothing known are ignored.

    Raises:
        ValueError: an option of the released code that is not supported
    """
    options = collect_options(model_class(variant).Config)
    config = {RENAMED_KEYS.get(key, key): value for key, value in config.items()}
    parameterization = config.pop("parameterization", None)
    scaling = str(parameterization).lower()
    if scaling in WIDTH_SCALING + DEPTH_SCALING:
        config["mup"] = True
    elif parameterization is not None:
        raise ValueError(
            f"parameterization={parameterization!r} in the released config: only "
            "None, 'widthmuP', 'completeP' and 'spectralP' are supported"
        )
    if "stem" not in config:
        config = {**FORM_OF_RELEASED_CODE, **config}
    base_depth = config.get("num_hidden_layers_base")
    # the released code ignores the base without depth scaling
    scales_depth = scaling in DEPTH_SCALING or "stem" in config
    if scales_depth and base_depth is not None and config.get("residual_branch_mult") is None:
        config["residual_branch_mult"] = base_depth / config["num_hidden_layers"]
    settings = check_settings(
        {key: value for key, value in config.items() if key in options}, options
    )
    for key in sorted(config.keys() & SUPPORTED_VALUES.keys() - options.keys()):
        if config[key] not in SUPPORTED_VALUES[key]:
            supported = " or ".join(map(repr, SUPPORTED_VALUES[key]))
            raise ValueError(
                f"{key}={config[key]!r} in the released config: only {supported} is supported"
            )
    return settings


def describe(folder: Path) -> tuple[str, dict[str, object]]:
    """Return the variant of a released or exported folder, and the settings of its model.

    Raises:
        ValueError: the folder is missing, damaged, or has something that is not supported
    """
    config_file = folder / "config.json"
    config = files.read_json(config_file)
    is_exported = "stem" in config
    tensors = {} if is_exported else weights.load_tensors(folder)
    variant = str(config["stem"]) if is_exported else detect_variant(tensors)
    try:
        settings = read_settings(config, variant)
    except ValueError as error:
        raise ValueError(f"{config_file}: {error}") from error
    if not is_exported and "-CC" in variant:
        # the config has the default of this key, 4, whatever the weights have
        num_taps = tensors["readout.weight"].shape[1]
        value_channels = settings.get(
            "ddl_value_channels", model_class(variant).Config.ddl_value_channels
        )
        if num_taps == value_channels or settings.get("ddl_cc_read") == "folded":
            num_taps = None
        settings["ddl_state_shortconv_kernel_size"] = num_taps
    return variant, settings
