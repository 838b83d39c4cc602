"""The sizes and models that are measured, by suite and command line."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import configurator
from configurator import collect_options
from model import MODEL_NAMES, build, kernels, model_class
from utils import errors, machine

BASELINE = "gpt-mha-rope"
CC_EC = "DDL-gpt-mha-rope-CC-EC"
SIZE_KEYS = (
    "vocab_size",
    "block_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "hidden_size",
)
QUICK = {
    "vocab_size": 1024,
    "block_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 64,
    "hidden_size": 256,
}
SMALL = {
    "vocab_size": 50304,
    "block_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "head_dim": 128,
    "hidden_size": 768,
    "mup": True,
}
MEDIUM = {
    "vocab_size": 50304,
    "block_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "mup": True,
}
TINY = {
    "vocab_size": 64,
    "block_size": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
    "mup": True,
}
PAPER = {"small": SMALL, "medium": MEDIUM}
ALL_MODELS = (BASELINE, *(name for name in MODEL_NAMES if name != BASELINE))
KERNEL_VARIANTS = (
    f"{CC_EC}+state_checkpoint_interval=4",
    f"{CC_EC}+kernels=off",
    f"{BASELINE}+kernels=off",
)


@dataclass(frozen=True)
class Suite:
    """Sizes and models that are measured together.

    sizes: model keys by the name of the size. models: as `parse_model` reads them.
    micro_batch_size: sequences per step.
    """

    sizes: dict[str, dict[str, Any]]
    models: tuple[str, ...]
    micro_batch_size: int


SUITES = {
    "quick": Suite({"quick": QUICK}, ALL_MODELS, micro_batch_size=8),
    "targets": Suite(
        PAPER,
        (BASELINE, CC_EC, "DDL-gpt-mha-rope", "DDL-vdim1-gpt-mha-rope"),
        micro_batch_size=16,
    ),
    # the paper's numbers of value channels: 1 is a model of its own, 4 the default
    "paper": Suite(
        PAPER, (*ALL_MODELS, f"{CC_EC}:2", f"{CC_EC}:8", *KERNEL_VARIANTS), micro_batch_size=16
    ),
    # the code paths of the other suites, at sizes that take seconds
    "rehearsal": Suite({"small": TINY, "medium": TINY}, (BASELINE, CC_EC), micro_batch_size=1),
}


class ModelChoice(NamedTuple):
    """A model of `--models`: its name, the keys of its config, and the options of `kernels.use`."""

    model_name: str
    settings: dict[str, Any]
    kernel_options: dict[str, Any]


def parse_model(text: str) -> ModelChoice:
    """Parse `model`, `model:d_v`, or either followed by settings.

    A setting is `+kernels=off`, `+state_checkpoint_interval=4`, or a key of the model's config, for
    example `+state_dtype=float32`.

    Raises:
        ValueError: there is no such model, number of value channels or key
    """
    model_text, *setting_texts = text.split("+")
    model_name, colon, value_channels = model_text.partition(":")
    if colon and not value_channels.isdecimal():
        raise ValueError(
            f"--models: {text}: after the colon give a number of value channels, as in {CC_EC}:2"
        )
    config_class = model_class(model_name).Config
    config_options = collect_options(config_class)
    settings = {}
    kernel_options = {}
    for setting_text in setting_texts:
        key, _, value = setting_text.partition("=")
        if key == "kernels" and value in ("auto", "on", "off"):
            kernel_options["setting"] = value
        elif key == "state_checkpoint_interval" and value.isdecimal() and int(value):
            kernel_options["state_checkpoint_interval"] = int(value)
        elif key in config_options:
            settings.update(configurator.read_settings({}, {key: value}, config_options))
        else:
            raise ValueError(
                f"--models: {text}: after a plus give kernels=auto, on or off, "
                "state_checkpoint_interval=1 or more, or a key of the model's config"
            )
    if colon:
        if config_class.expansion_key is None:
            raise ValueError(
                f"--models: {text}: {model_name} has no value channels: omit the colon and the "
                "number"
            )
        settings[config_class.expansion_key] = int(value_channels)
    return ModelChoice(model_name, settings, kernel_options)


def make_row_name(model: str) -> str:
    """Return the name of a model of `--models` in tables and files."""
    return model.replace(":", " d_v=").replace("+", " ")


def build_model(
    model: str, size: dict[str, Any], args: SimpleNamespace, device: torch.device
) -> torch.nn.Module:
    """Build a model of `--models` with seed 0.

    It uses the kernels of the command line, except where its own text says otherwise.
    """
    model_name, settings, kernel_options = parse_model(model)
    torch.manual_seed(0)
    built = build(model_name, **size, **settings)
    kernels.use(
        built,
        setting=kernel_options.get("setting", args.kernels),
        state_checkpoint_interval=kernel_options.get(
            "state_checkpoint_interval", args.state_checkpoint_interval
        ),
        device=device,
    )
    return built


def complete_arguments(args: SimpleNamespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """Fill in the arguments that depend on suite and device, and return the sizes.

    Raises:
        ValueError: something cannot be measured
    """
    suite = SUITES[args.suite]
    models = args.models.split(",") if args.models else suite.models
    args.models = list(dict.fromkeys([BASELINE, *models]))  # each once, the baseline first
    args.micro_batch_size = args.micro_batch_size or suite.micro_batch_size
    if args.steps is None:
        args.steps = 4 if device.type == "cuda" else 1
    if args.suite in ("targets", "paper") and device.type == "cpu":
        raise ValueError(
            f"--suite={args.suite} contains sizes for a GPU: give --suite=quick, or --device=cuda"
        )
    if args.compile and not machine.can_compile(device.type):
        raise ValueError(
            "--compile=True needs a C++ compiler and Python's headers: install them, or "
            "--compile=False"
        )
    changes = {}
    for key in SIZE_KEYS:
        if getattr(args, key) is not None:
            changes[key] = getattr(args, key)
    sizes = {}
    for name in args.sizes.split(",") if args.sizes else suite.sizes:
        if name not in suite.sizes:
            raise ValueError(
                f"--sizes: the {args.suite} suite has no {name}{errors.suggest(name, suite.sizes)}; "
                f"it has {', '.join(suite.sizes)}"
            )
        size_name = f"{name} (changed)" if changes else name
        sizes[size_name] = {**suite.sizes[name], **changes}
    for size in sizes.values():
        for model in args.models:
            with torch.device("meta"):
                build_model(model, size, args, device)
    return sizes
