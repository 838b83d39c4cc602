"""What is measured: sizes and models by suite and command line."""

from dataclasses import dataclass

import torch

import configurator
from model import MODEL_NAMES, build, kernels, model_class
from model.options import collect_options
from utils import errors, machine

BASELINE, CC_EC = "gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC"
SIZE_KEYS = "vocab_size block_size num_hidden_layers num_attention_heads head_dim hidden_size"
SIZE_KEYS = tuple(SIZE_KEYS.split())
QUICK = dict(zip(SIZE_KEYS, (1024, 256, 6, 4, 64, 256)))
SMALL = dict(zip(SIZE_KEYS, (50304, 1024, 12, 6, 128, 768)), mup=True)
MEDIUM = dict(zip(SIZE_KEYS, (50304, 1024, 24, 8, 128, 1024)), mup=True)
TINY = dict(zip(SIZE_KEYS, (64, 3, 1, 2, 8, 16)), mup=True)
PAPER = {"small": SMALL, "medium": MEDIUM}
EVERY_STEM = (BASELINE, *(stem for stem in MODEL_NAMES if stem != BASELINE))
MODES = (f"{CC_EC}+state_checkpoint_interval=4", f"{CC_EC}+kernels=off", f"{BASELINE}+kernels=off")


@dataclass(frozen=True)
class Suite:
    sizes: dict[str, dict]
    models: tuple[str, ...]  # as `split_model` reads them
    micro_batch_size: int  # sequences per step
    peers: bool = True


SUITES = {
    "quick": Suite({"quick": QUICK}, EVERY_STEM, 8),
    "targets": Suite(
        PAPER, (BASELINE, CC_EC, "DDL-gpt-mha-rope", "DDL-vdim1-gpt-mha-rope"), 16, False
    ),
    # The paper's d_v: 1 is a stem of its own, 4 the default.
    "paper": Suite(PAPER, (*EVERY_STEM, f"{CC_EC}:2", f"{CC_EC}:8", *MODES), 16),
    # What the others do at sizes of seconds, to see that it can be done.
    "rehearsal": Suite({"small": TINY, "medium": TINY}, (BASELINE, CC_EC), 1, False),
}


def split_model(text: str) -> tuple[str, dict, dict]:
    """`stem`, `stem:d_v`, or either with `+kernels=off`, `+state_checkpoint_interval=4`, or a key of the
    stem's as in `+state_dtype=float32`: the stem, its keys, the kernels'.

    ValueError: there is no such stem, number of columns or key.
    """
    stem, *settings = text.split("+")
    stem, colon, columns = stem.partition(":")
    if colon and not columns.isdecimal():
        raise ValueError(
            f"--models: {text}: after the colon comes a number of columns, as in {CC_EC}:2"
        )
    keys, fused, known = {}, {}, collect_options(model_class(stem).Config)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "kernels" and value in ("auto", "on", "off"):
            fused["setting"] = value
        elif key == "state_checkpoint_interval" and value.isdecimal() and int(value):
            fused["state_checkpoint_interval"] = int(value)
        elif key in known:
            keys |= configurator.read_settings({}, {key: value}, known)
        else:
            after = "kernels=auto, on or off, state_checkpoint_interval=1 or more, or a key of its config"
            raise ValueError(f"--models: {text}: after a plus comes {after}")
    if colon:
        if (key := model_class(stem).Config.expansion_key) is None:
            raise ValueError(f"--models: {text}: {stem} has no columns: leave the colon out")
        keys[key] = int(columns)
    return stem, keys, fused


def row_name(model: str) -> str:
    return model.replace(":", " d_v=").replace("+", " ")


def built(model: str, size: dict, args, device: torch.device):
    """The model that `split_model` reads, with seed 0, its kernels as args say."""
    stem, keys, fused = split_model(model)
    torch.manual_seed(0)
    made = build(stem, **size, **keys)
    fused = {
        "setting": args.kernels,
        "state_checkpoint_interval": args.state_checkpoint_interval,
    } | fused
    kernels.use(made, **fused, device=device)
    return made


def complete(args, device: torch.device) -> dict[str, dict]:
    """Fill in what follows from suite and device; the sizes, with what the command line changes.

    ValueError: what cannot be measured, said before anything is.
    """
    suite, changes = SUITES[args.suite], {key: getattr(args, key) for key in SIZE_KEYS}
    changes = {key: value for key, value in changes.items() if value is not None}
    models = args.models.split(",") if args.models else suite.models
    args.models = list(dict.fromkeys([BASELINE, *models]))  # each once, the baseline first
    args.micro_batch_size = args.micro_batch_size or suite.micro_batch_size
    args.steps = args.steps or (4 if device.type == "cuda" else 1)
    if args.suite in ("targets", "paper") and device.type == "cpu":
        sizes = f"--suite={args.suite} holds sizes for a GPU"
        raise ValueError(f"{sizes}: give --suite=quick, or --device=cuda")
    if args.compile == "True" and not machine.can_compile(device.type):
        needs = "--compile=True needs a C++ compiler and Python's headers"
        raise ValueError(f"{needs}: install them, or --compile=False")
    sizes = {}
    for name in args.sizes.split(",") if args.sizes else suite.sizes:
        if name not in suite.sizes:
            near = f"{errors.suggest(name, suite.sizes)}; it has {', '.join(suite.sizes)}"
            raise ValueError(f"--sizes: the {args.suite} suite has no {name}{near}")
        sizes[f"{name} (changed)" if changes else name] = suite.sizes[name] | changes
    for size in sizes.values():
        for model in args.models:
            with torch.device("meta"):
                built(model, size, args, device)
    return sizes
