"""What is measured: sizes and models by suite and command line."""

from dataclasses import dataclass

import torch

import configurator
from model import STEMS, build, kernels, model_class
from training import distributed

BASELINE = "gpt-mha-rope"
PLAIN = "+kernels=off"
PLAIN_BASELINE, CC_EC = BASELINE + PLAIN, "DDL-gpt-mha-rope-CC-EC"
PEERS = ("transcription",)
SIZE_KEYS = (
    "vocab_size",
    "block_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "hidden_size",
)
QUICK = dict(zip(SIZE_KEYS, (1024, 256, 6, 4, 64, 256)))
SMALL = dict(zip(SIZE_KEYS, (50304, 1024, 12, 6, 128, 768)), mup=True)
MEDIUM = dict(zip(SIZE_KEYS, (50304, 1024, 24, 8, 128, 1024)), mup=True)
TINY = dict(zip(SIZE_KEYS, (64, 3, 1, 2, 8, 16)), mup=True)
EVERY_STEM = (BASELINE, *(stem for stem in STEMS if stem != BASELINE))


@dataclass(frozen=True)
class Suite:
    sizes: dict[str, dict]
    models: tuple[str, ...]  # as `split_model` reads them
    micro_batch_size: int  # sequences per step
    peers: tuple[str, ...] = PEERS


SUITES = {
    "quick": Suite({"quick": QUICK}, EVERY_STEM, 8),
    # Without peers and what else takes time to compile.
    "targets": Suite(
        {"small": SMALL, "medium": MEDIUM},
        (
            BASELINE,
            CC_EC,
            "DDL-gpt-mha-rope",
            "DDL-vdim1-gpt-mha-rope",
            f"{CC_EC}:2",
            f"{CC_EC}+state_interval=4",
        ),
        16,
        (),
    ),
    # The paper's d_v: 1 is a stem of its own, 4 the default. And what the fused kernels and the memory option bring.
    "paper": Suite(
        {"small": SMALL, "medium": MEDIUM},
        (
            *EVERY_STEM,
            f"{CC_EC}:2",
            f"{CC_EC}:8",
            f"{CC_EC}+state_interval=4",
            f"{CC_EC}+kernels=off",
            PLAIN_BASELINE,
        ),
        16,
    ),
    # What the others do at sizes of seconds, to see that it can be done.
    "rehearsal": Suite({"small": TINY, "medium": TINY}, (BASELINE, CC_EC), 1),
}
ON_CPU = ("quick", "rehearsal")


def split_model(text: str) -> tuple[str, dict, dict]:
    """`stem`, `stem:d_v`, or either with `+kernels=off`, `+state_interval=4`, or a key of the stem's as in
    `+state_dtype=float32`: the stem, its keys, the kernels'.
    """
    stem, *settings = text.split("+")
    stem, colon, columns = stem.partition(":")
    if colon and not columns.isdecimal():
        raise ValueError(
            f"--models: {text}: after the colon comes a number of columns, as in DDL-gpt-mha-rope-CC:2"
        )
    keys, values, known = {}, {}, configurator.knobs(model_class(stem).Config)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "kernels" and value in ("auto", "on", "off"):
            values["setting"] = value
        elif key == "state_interval" and value.isdecimal() and int(value):
            values["state_interval"] = int(value)
        elif key in known:
            keys |= configurator.given({}, {key: value}, known)
        else:
            raise ValueError(
                f"--models: {text}: after a plus comes kernels=auto, on or off, state_interval=1 or more, "
                f"or a key of {stem}"
            )
    key = model_class(stem).Config.columns_key
    if colon and key is None:
        raise ValueError(f"--models: {text}: {stem} has no columns: leave the colon out")
    return stem, keys | ({key: int(columns)} if colon else {}), values


def row_name(model: str) -> str:
    return model.replace(":", " d_v=").replace("+", " ")


def check(args, device: torch.device, sizes: dict[str, dict]) -> None:
    """ValueError: what cannot be measured, said before anything is."""
    if min(args.rounds, args.visits, args.warmup, args.micro_batch_size, args.steps) < 1:
        raise ValueError(
            "--rounds, --visits, --warmup, --steps and --micro_batch_size: give 1 or more"
        )
    if args.suite not in ON_CPU and device.type == "cpu":
        raise ValueError(
            f"--suite={args.suite} holds sizes for a GPU: give --suite=quick, or --device=cuda"
        )
    if args.compile == "True" and not distributed.can_compile(device):
        raise ValueError(
            "--compile=True needs a C++ compiler and Python's headers: install them, or --compile=False"
        )
    for peer in args.peers:
        if peer not in PEERS:
            raise ValueError(f"--peers={peer}: give {', '.join(PEERS)} or none")
    for size in sizes.values():
        for model in args.models:
            stem, keys, fused = split_model(model)
            with torch.device("meta"):
                made = build(stem, **size, **keys)
            kernels.use(
                made,
                **{"setting": args.kernels, "state_interval": args.state_interval} | fused,
                device=device,
            )


def sizes_of(args) -> dict[str, dict]:
    """The suite's sizes, those of --sizes alone where given, with what the command line changes."""
    known, changes = SUITES[args.suite].sizes, {key: getattr(args, key) for key in SIZE_KEYS}
    changes = {key: value for key, value in changes.items() if value is not None}
    names = args.sizes.split(",") if args.sizes else list(known)
    for name in names:
        if name not in known:
            near = configurator.nearest(name, known)
            raise ValueError(
                f"--sizes: the {args.suite} suite has no {name}{near}; it has {', '.join(known)}"
            )
    return {f"{name} (changed)" if changes else name: known[name] | changes for name in names}


def complete(args, device: torch.device) -> None:
    """Fill in what follows from suite and device."""
    suite = SUITES[args.suite]
    args.models = args.models.split(",") if args.models else list(suite.models)
    args.models = list(
        dict.fromkeys([BASELINE, *args.models])
    )  # each once, the baseline with its peers first
    args.peers = (
        suite.peers
        if args.peers is None
        else [p for p in args.peers.split(",") if p not in ("", "none")]
    )
    args.micro_batch_size = (
        suite.micro_batch_size if args.micro_batch_size is None else args.micro_batch_size
    )
    if args.steps is None:
        args.steps = 4 if device.type == "cuda" else 1
    if args.visits is None:
        args.visits = (
            1 if device.type == "cuda" else 2
        )  # a CPU's speed drifts with what else the machine does
