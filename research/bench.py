"""Measure speed, interleaved in one process so that what else the machine does falls on all alike.

    python research/bench.py --device=cpu                       every variant and its peers, a size for two CPU cores
    python research/bench.py --suite=paper --device=cuda        the paper's small and medium sizes
    python research/bench.py --models=DDL-gpt-mha-rope-CC:2 --hidden_size=128 --num_hidden_layers=4
    python research/bench.py decode                          tokens/s of generation, with and without cache and compiler
    python research/bench.py train --device=cuda        train.py itself: tokens/s, utilisation, memory, bitwise resuming
    python research/bench.py profile --device=cuda              the kernels that a training step spends its time on
    python research/bench.py tests                              the tests that need a GPU
    python research/bench.py costs                              parameters, state and FLOPs of every model, counted
    python research/bench.py peers                      final loss beside GPT-2's by its own code, each at its best rate

`step`, which needs no name, measures training steps (forward, backward, AdamW) and forward passes without gradients.
Models take turns in groups: the baseline, one variant and its peers; on a CPU every group is visited twice. A ratio is
the baseline's time over the model's in the same round: the median over the rounds, with the 10th and 90th percentile. A
peer is a straight transcription of the equations (research/benchmarks/transcription.py), eager and compiled.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import configurator
from research.benchmarks import (
    costs,
    decode,
    end_to_end,
    gpu_tests,
    kernel_bandwidth,
    peer_quality,
    profile,
    step,
    suites,
)


def widths(text: str) -> list[int]:
    """Hidden sizes from 768,1024."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text}: give whole numbers from 1 on with commas between, as in 768,1024"
        )
    return [int(part) for part in parts]


def rates(text: str) -> list[float]:
    """Learning rates from 1e-3,2e-3."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise argparse.ArgumentTypeError(
            f"{text}: give numbers above 0 with commas between, as in 1e-3,2e-3"
        )
    return values


def add_json(parser) -> None:
    parser.add_argument(
        "--json", type=Path, help="write the figures there as well, after each of them"
    )
    resume = "keep what the file has of the same code, chip and settings"
    parser.add_argument("--resume", action="store_true", help=resume)


def of_suites(parser) -> None:
    """Options that choose sizes and models."""
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add(
        "--suite",
        choices=suites.SUITES,
        default="quick",
        help="sizes and models: quick; on a GPU the paper's, or only those with targets",
    )
    add("--sizes", help="some of the suite's sizes, as in --sizes=small")
    add("--models", help="stems, or stem:d_v, or either+kernels=off, +state_interval=4, +KEY=VALUE, with commas "
        "between (default: the suite's); the baseline is always there")  # fmt: skip
    add(
        "--kernels",
        choices=("auto", "on", "off"),
        default="auto",
        help="fused residual steps, as train.py's key",
    )
    add("--state_interval", type=int, default=2, help="as train.py's key (default: %(default)s)")
    for key in suites.SIZE_KEYS:
        add(f"--{key}", type=int, help="instead of the suite's")
    add("--micro_batch_size", type=int, help="sequences per step (default: the suite's)")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--compile", choices=("True", "False"), default="True")


def step_arguments(parser) -> None:
    of_suites(parser)
    add = parser.add_argument
    add("--peers", help=f"of {','.join(suites.PEERS)}, or none (default: the suite's)")
    add(
        "--warmup",
        type=int,
        default=3,
        help="turns of each model before measuring (default: %(default)s)",
    )
    add(
        "--rounds", type=int, default=20, help="measured turns of each model (default: %(default)s)"
    )
    add(
        "--visits",
        type=int,
        help="in so many visits, all other models between them (default: 2, on a GPU 1)",
    )
    add(
        "--steps",
        type=int,
        help="steps in a turn; the device is waited for after the last (default: 1, on a GPU 4)",
    )
    add("--limit", type=float, help="each model in a process of its own, which ends within so many seconds; one that "
        "fails is measured without kernels, and the others all the same")  # fmt: skip
    add_json(parser)


def profile_arguments(parser) -> None:
    of_suites(parser)
    parser.add_argument(
        "--steps", type=int, default=10, help="that are profiled (default: %(default)s)"
    )
    parser.set_defaults(peers="none", rounds=1, warmup=1, visits=1)
    add_json(parser)


def kernels_arguments(parser) -> None:
    add = parser.add_argument
    add(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="cpu: only with TRITON_INTERPRET=1, to test",
    )
    add("--widths", type=widths, default="768,1024", help="hidden sizes d (default: %(default)s)")
    add(
        "--match",
        default="",
        help="only kernels with this in their name, as in --match='step K=1 v=4'",
    )
    add("--micro_batch_size", type=int, default=16, help="sequences (default: %(default)s)")
    add("--block_size", type=int, default=1024, help="tokens of a sequence (default: %(default)s)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add(
        "--rounds",
        type=int,
        default=20,
        help="measured calls of each kernel (default: %(default)s)",
    )
    add(
        "--copied",
        type=int,
        default=2**30,
        help="bytes of the copy to compare with (default: %(default)s)",
    )
    add(
        "--tune",
        action="store_true",
        help="instead the launches (model/kernels/launch.py) of the kernels of --match",
    )
    add("--launches", type=int, help="of --tune: at most so many for each kernel")
    add_json(parser)


def decode_arguments(parser) -> None:
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--models", help="stems, or stem:d_v, with commas between (default: every stem)")
    for key in suites.SIZE_KEYS:
        add(f"--{key}", type=int, help=f"(default: {suites.QUICK[key]})")
    add("--batch_size", type=int, default=1, help="sequences (default: %(default)s)")
    add(
        "--context",
        type=int,
        default=128,
        help="tokens that are there before (default: %(default)s)",
    )
    add("--tokens", type=int, default=32, help="decoded in a turn (default: %(default)s)")
    add(
        "--compile",
        choices=("True", "False"),
        default="True",
        help="also the step compiled, or as a CUDA graph",
    )
    add("--rounds", type=int, default=10, help="measured turns of each (default: %(default)s)")
    add("--note", default="", help="stored with the figures: what else the machine was doing")
    add_json(parser)


def train_arguments(parser) -> None:
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add(
        "--configs",
        default="gpt_small,ddl_dv4_cc_ec_small,ddl_dv1_small",
        help="of config/ (default: %(default)s)",
    )
    add(
        "--what",
        default="speed,resume",
        help="speed of a run's steps, and whether a resumed run has the same bits",
    )
    add(
        "--steps",
        type=int,
        default=50,
        help="of a run; it is resumed from the middle (default: %(default)s)",
    )
    for key in suites.SIZE_KEYS:
        add(f"--{key}", type=int, help="instead of the config's")
    add(
        "--global_batch_size",
        type=int,
        default=32,
        help="sequences per step (default: %(default)s)",
    )
    add(
        "--micro_batch_size",
        type=int,
        default=16,
        help="sequences per forward pass (default: %(default)s)",
    )
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add("--compile", choices=("True", "False"), default="True")
    add(
        "--corpus_tokens",
        type=int,
        default=4_000_000,
        help="drawn at random (default: %(default)s)",
    )
    add("--vocabulary", type=int, default=50257, help="of the tokens drawn (default: %(default)s)")
    add(
        "--limit",
        type=float,
        default=86400,
        help="seconds after which a run counts as failed (default: a day)",
    )
    add_json(parser)


def tests_arguments(parser) -> None:
    add = parser.add_argument
    add(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="cuda",
        help="cpu: to see that they are found",
    )
    add(
        "--workers",
        type=int,
        default=8,
        help="processes, where pytest-xdist is installed (default: %(default)s)",
    )
    add("--limit", type=float, default=600, help="seconds for each file (default: %(default)s)")
    add_json(parser)


def peers_arguments(parser) -> None:
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="cpu")
    add(
        "--config",
        type=Path,
        default=Path("config/demo_cpu.py"),
        help="what is trained (default: %(default)s)",
    )
    add(
        "--rates",
        type=rates,
        default="2e-3,4e-3",
        help="learning rates to begin with (default: %(default)s)",
    )
    add(
        "--seeds", type=int, default=3, help="seeds at the best rate, from 0 (default: %(default)s)"
    )
    add_json(parser)


def costs_arguments(parser) -> None:
    add = parser.add_argument
    add(
        "--models",
        help="stems, stem:d_v or either+KEY=VALUE, with commas between (default: every stem)",
    )
    add(
        "--size",
        choices=("small", "medium"),
        default="small",
        help="the paper's (default: %(default)s)",
    )
    add("--json", type=Path, help="write the figures there as well")


# name: (what it measures, its arguments, what runs it)
COMMANDS = {
    "step": ("training steps and forward passes; the default", step_arguments, step.run),
    "profile": ("what a step spends its time on, kernel by kernel", profile_arguments, profile.run),
    "kernels": (
        "bandwidth of the fused kernels against a copy",
        kernels_arguments,
        kernel_bandwidth.run,
    ),
    "decode": (
        "one-token decoding: uncached, cached, and by a step that is made once",
        decode_arguments,
        decode.run,
    ),
    "train": (
        "train.py itself: speed, memory and resuming to the bit",
        train_arguments,
        end_to_end.run,
    ),
    "tests": ("whether the tests that need a GPU pass", tests_arguments, gpu_tests.run),
    "peers": (
        "final loss beside GPT-2's, each at its best rate",
        peers_arguments,
        peer_quality.run,
    ),
    "costs": (
        "parameters, state and FLOPs of every model, counted, not measured",
        costs_arguments,
        costs.run,
    ),
}


def arguments(argv: list[str]):
    """The parsed command line; without a command it is `step`'s."""
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    helps = []
    for name, (what, add_arguments, _) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what)
        add_arguments(command)
        helps.append(command.format_help())
    parser.epilog = "\n".join(helps)
    if not argv or argv[0] not in (*COMMANDS, "-h", "--help"):
        argv = ["step", *argv]
    return parser.parse_args(argv)


def main():
    args = arguments(sys.argv[1:])
    with configurator.one_line_errors():
        COMMANDS[args.command][2](args)


if __name__ == "__main__":
    main()
