"""Measure speed in turns in one process, so that other load on the machine affects all models alike.

    python research/bench.py --device=cpu                 # training steps of every model, a size for two CPU cores
    python research/bench.py --suite=paper --device=cuda  # the paper's small and medium sizes
    python research/bench.py --models=DDL-gpt-mha-rope-CC:2 --hidden_size=128 --num_hidden_layers=4
    python research/bench.py decode                       # tokens/s of generation, with and without cache and compiler
    python research/bench.py profile --device=cuda        # the kernels that a training step spends its time on
    python research/bench.py kernels                      # bandwidth of the fused kernels against a copy
    python research/bench.py costs                        # parameters, state and FLOPs of every model, counted
    python research/bench.py peers                        # speed beside a plain GPT and transformers' GPT-2

`step`, which is the default command, measures training steps (forward, backward, AdamW) and forward passes
without gradients. Each model takes turns with the baseline. `COMMAND --help` lists the options of a command.
"""

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import configurator
from research.benchmarks import (
    costs,
    decode,
    kernel_bandwidth,
    peers,
    profile_step,
    step,
    suites,
)


def parse_widths(text: str) -> list[int]:
    """Parse hidden sizes, separated by commas."""
    return [parse_count(part) for part in text.split(",")]


def parse_count(text: str) -> int:
    """Parse a whole number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return int(text)


def add_option(
    parser: ArgumentParser, name: str, default: Any, help: str, **parser_options
) -> None:
    """Add `--name`, and show its default in its help."""
    if default not in (None, ""):
        help = f"{help} (default: %(default)s)"
    parser.add_argument(f"--{name}", default=default, help=help, **parser_options)


def add_count(parser: ArgumentParser, name: str, default: int | None, help: str) -> None:
    """Add an option that is a whole number from 1 on."""
    add_option(parser, name, default, help, type=parse_count)


def add_common_options(parser: ArgumentParser, device: str = "auto") -> None:
    """Add the options of all commands that measure on a chosen device."""
    add_option(parser, "device", device, "device to measure on", choices=("auto", "cuda", "cpu"))
    add_option(
        parser,
        "json",
        None,
        "file to store the results in; it is updated after each of them",
        type=Path,
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the results in the file that were measured with the same code, processor and "
        "settings",
    )


def add_size_options(parser: ArgumentParser, defaults: dict[str, int], suffix: str = "") -> None:
    """Add the keys of a model's size; `suffix` is added to each help."""
    descriptions = {
        "vocab_size": "vocabulary size",
        "block_size": "tokens per sequence",
        "num_hidden_layers": "number of blocks",
        "num_attention_heads": "number of attention heads",
        "head_dim": "features per attention head",
        "hidden_size": "width d",
    }
    for key in suites.SIZE_KEYS:
        add_count(parser, key, defaults.get(key), descriptions[key] + suffix)


def add_model_options(parser: ArgumentParser) -> None:
    """Add the options that choose sizes and models of suites."""
    add_option(parser, "suite", "quick", "sizes and models to measure", choices=suites.SUITES)
    add_option(parser, "sizes", None, "measure only these sizes of the suite, as in --sizes=small")
    add_option(
        parser,
        "models",
        None,
        "models separated by commas, each as MODEL or MODEL:d_v, optionally followed by +kernels=off, "
        "+state_checkpoint_interval=4 or +KEY=VALUE (default: those of the suite)",
    )
    add_option(parser, "kernels", "auto", "train.py's key kernels", choices=("auto", "on", "off"))
    add_count(parser, "state_checkpoint_interval", 2, "train.py's key state_checkpoint_interval")
    add_size_options(parser, {}, suffix=" (default: that of the suite)")
    add_count(parser, "micro_batch_size", None, "sequences per step (default: that of the suite)")
    add_option(parser, "dtype", "bfloat16", "dtype of autocast", choices=("float32", "bfloat16"))
    add_option(parser, "compile", "True", "compile the models", choices=("True", "False"))


def add_step_options(parser: ArgumentParser) -> None:
    """Add the options of `bench.py step`."""
    add_common_options(parser)
    add_model_options(parser)
    add_count(parser, "warmup", 3, "warmup turns of each model")
    add_count(parser, "rounds", 20, "measured turns of each model")
    add_count(parser, "steps", None, "steps per turn (default: 1 on a CPU, 4 on a GPU)")


def add_profile_options(parser: ArgumentParser) -> None:
    """Add the options of `bench.py profile`."""
    add_common_options(parser)
    add_model_options(parser)
    add_count(parser, "steps", 10, "number of steps to profile")


def add_kernel_options(parser: ArgumentParser) -> None:
    """Add the options of `bench.py kernels`."""
    add_common_options(parser)
    add_option(parser, "widths", "768,1024", "hidden sizes d", type=parse_widths)
    add_option(
        parser, "match", "", "only kernels with this in their name, as in --match='step K=1 v=4'"
    )
    add_count(parser, "micro_batch_size", 16, "sequences per call")
    add_count(parser, "block_size", 1024, "tokens per sequence")
    add_option(
        parser,
        "dtype",
        "bfloat16",
        "dtype of the state",
        choices=("bfloat16", "float16", "float32"),
    )
    add_count(parser, "rounds", 20, "measured calls of each kernel")
    add_count(parser, "copied", 2**30, "size in bytes of the copy that kernels are compared with")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="instead, time other launches (model/kernels/launch.py) of the kernels that --match "
        "selects",
    )
    add_count(parser, "launches", None, "with --tune, largest number of launches to try per kernel")


def add_decode_options(parser: ArgumentParser) -> None:
    """Add the options of `bench.py decode`."""
    add_common_options(parser)
    add_option(
        parser,
        "models",
        None,
        "models separated by commas, each as MODEL or MODEL:d_v (default: all models)",
    )
    add_size_options(parser, suites.QUICK)
    add_count(parser, "batch_size", 1, "number of sequences to decode together")
    add_count(parser, "context", 128, "number of context tokens before the decoded ones")
    add_count(parser, "tokens", 32, "tokens to decode per turn")
    add_count(parser, "rounds", 10, "measured turns of each way to decode")
    add_option(
        parser,
        "compile",
        "True",
        "also measure the step compiled, or as a CUDA graph",
        choices=("True", "False"),
    )
    add_option(
        parser,
        "note",
        "",
        "note to store with the figures, for example on other load on the machine",
    )


def add_peer_options(parser: ArgumentParser) -> None:
    """Add the options of `bench.py peers`."""
    add_common_options(parser)
    add_size_options(parser, suites.QUICK)
    add_count(parser, "micro_batch_size", 8, "sequences per training step, and texts to generate")
    add_count(parser, "tokens", 200, "tokens to generate per turn")
    add_count(parser, "rounds", 7, "measured turns of each model")
    add_option(parser, "dtype", "float32", "dtype of autocast", choices=("float32", "bfloat16"))
    add_option(parser, "compile", "True", "compile training steps", choices=("True", "False"))


def add_cost_options(parser: ArgumentParser) -> None:
    """Add the options of `bench.py costs`."""
    parser.add_argument(
        "--models",
        help="models separated by commas, each as MODEL or MODEL:d_v, optionally followed by "
        "+KEY=VALUE (default: all models)",
    )
    add_option(parser, "size", "small", "one of the paper's sizes", choices=suites.PAPER)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


class Command(NamedTuple):
    """A command of bench.py: its help, and functions that add its options and run it."""

    help: str
    add_options: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]


COMMANDS = {
    "step": Command(
        "measure training steps and forward passes; the default command",
        add_step_options,
        step.run,
    ),
    "profile": Command(
        "find the kernels that a training step spends its time on",
        add_profile_options,
        profile_step.run,
    ),
    "kernels": Command(
        "measure the bandwidth of the fused kernels",
        add_kernel_options,
        kernel_bandwidth.run,
    ),
    "decode": Command(
        "measure one-token decoding with and without a cache",
        add_decode_options,
        decode.run,
    ),
    "peers": Command(
        "measure speed beside a plain GPT and transformers' GPT-2",
        add_peer_options,
        peers.run,
    ),
    "costs": Command(
        "count parameters, state and FLOPs of every model",
        add_cost_options,
        costs.run,
    ),
}


def parse_arguments(argv: list[str]) -> Namespace:
    """Parse the command line; without a command it is that of `step`."""
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_options(commands.add_parser(name, help=command.help, description=command.help))
    if not argv or argv[0] not in (*COMMANDS, "-h", "--help"):
        argv = ["step", *argv]
    return parser.parse_args(argv)


def main() -> None:
    """Run the command."""
    args = parse_arguments(sys.argv[1:])
    with errors.one_line_errors():
        COMMANDS[args.command].run(args)


if __name__ == "__main__":
    main()
