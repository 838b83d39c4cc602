"""Measure speed, interleaved in one process so that what else the machine does falls on all alike.

    python research/bench.py --device=cpu                 training steps of every model, a size for two CPU cores
    python research/bench.py --suite=paper --device=cuda  the paper's small and medium sizes
    python research/bench.py --models=DDL-gpt-mha-rope-CC:2 --hidden_size=128 --num_hidden_layers=4
    python research/bench.py decode                       tokens/s of generation, with and without cache and compiler
    python research/bench.py profile --device=cuda        the kernels that a training step spends its time on
    python research/bench.py kernels                      bandwidth of the fused kernels against a copy
    python research/bench.py costs                        parameters, state and FLOPs of every model, counted
    python research/bench.py peers --nanogpt=FOLDER       speed beside nanoGPT's own code and transformers
    python research/bench.py quality                      final loss beside GPT-2's by its own code

`step`, which needs no name, measures training steps (forward, backward, AdamW) and forward passes
without gradients. Each model takes turns with the baseline and with the straight transcription of
its equations, eager and compiled (research/benchmarks/). `COMMAND --help` lists its options.
"""

import argparse
import sys
from pathlib import Path

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
    peer_quality,
    peers,
    profile,
    step,
    suites,
)


def many(kind, text: str) -> list:
    """Numbers above 0 with commas between them."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        example = "768,1024" if kind is int else "1e-3,2e-3"
        raise argparse.ArgumentTypeError(f"{text}: give numbers above 0, as in {example}")
    return values


def widths(text: str) -> list[int]:
    return many(int, text)


def rates(text: str) -> list[float]:
    return many(float, text)


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return int(text)


class Options:
    """Adds options to a parser; each with its default in its help."""

    def __init__(self, parser, device: str = "auto"):
        self.parser = parser
        self.add("device", device, "", choices=("auto", "cuda", "cpu"))
        self.add("json", None, "the figures' file, written after each of them", type=Path)
        resume = "keep what the file has of the same code, chip and settings"
        parser.add_argument("--resume", action="store_true", help=resume)

    def add(self, name: str, default, text: str, **keys) -> None:
        text += "" if default in (None, "") else " (default: %(default)s)"
        self.parser.add_argument(f"--{name}", default=default, help=text.strip(), **keys)

    def counts(self, **options: tuple) -> None:
        for name, (default, text) in options.items():
            self.add(name, default, text, type=count)

    def size(self, defaults: dict, text: str) -> None:
        for key in suites.SIZE_KEYS:
            self.add(key, defaults.get(key), text, type=count)

    def models(self) -> None:
        """Options that choose sizes and models of suites."""
        self.add("suite", "quick", "sizes and models", choices=suites.SUITES)
        self.add("sizes", None, "some of the suite's sizes, as in --sizes=small")
        forms = "stems, stem:d_v, or either +kernels=off, +state_checkpoint_interval=4, +KEY=VALUE"
        self.add("models", None, f"{forms}, with commas between (default: the suite's)")
        self.add("kernels", "auto", "as train.py's key", choices=("auto", "on", "off"))
        self.counts(state_checkpoint_interval=(2, "as train.py's key"))
        self.size({}, "instead of the suite's")
        self.counts(micro_batch_size=(None, "sequences per step (default: the suite's)"))
        self.add("dtype", "bfloat16", "", choices=("float32", "bfloat16"))
        self.add("compile", "True", "", choices=("True", "False"))


def of_step(parser) -> None:
    options = Options(parser)
    options.models()
    options.add(
        "peers", None, "measured beside (default: the suite's)", choices=("transcription", "none")
    )
    options.counts(warmup=(3, "turns of each model before measuring"))
    options.counts(rounds=(20, "measured turns of each model"))
    options.counts(steps=(None, "steps in a turn (default: 1, on a GPU 4)"))


def of_profile(parser) -> None:
    options = Options(parser)
    options.models()
    options.counts(steps=(10, "that are profiled"))


def of_kernels(parser) -> None:
    options = Options(parser)
    options.add("widths", "768,1024", "hidden sizes d", type=widths)
    options.add("match", "", "only kernels with this in their name, as in --match='step K=1 v=4'")
    options.counts(micro_batch_size=(16, "sequences"), block_size=(1024, "tokens of a sequence"))
    options.add("dtype", "bfloat16", "", choices=("bfloat16", "float16", "float32"))
    options.counts(rounds=(20, "measured calls of each kernel"))
    options.counts(copied=(2**30, "bytes of the copy to compare with"))
    tune = "instead the launches (model/kernels/launch.py) of the kernels of --match"
    parser.add_argument("--tune", action="store_true", help=tune)
    options.counts(launches=(None, "of --tune: at most so many for each kernel"))


def of_decode(parser) -> None:
    options = Options(parser)
    options.add("models", None, "stems, or stem:d_v, with commas between (default: every stem)")
    options.size(suites.QUICK, "")
    options.counts(batch_size=(1, "sequences"), context=(128, "tokens that are there before"))
    options.counts(tokens=(32, "decoded in a turn"), rounds=(10, "measured turns of each"))
    options.add(
        "compile", "True", "also the step compiled, or as a CUDA graph", choices=("True", "False")
    )
    options.add("note", "", "stored with the figures: what else the machine was doing")


def of_peers(parser) -> None:
    options = Options(parser, device="cpu")
    parser.add_argument(
        "--nanogpt", type=Path, required=True, help="folder of a clone of karpathy/nanoGPT"
    )
    options.counts(
        hidden_size=(256, "width d; heads have 64 features"),
        num_hidden_layers=(4, "blocks"),
        vocab_size=(1024, "tokens of the vocabulary"),
        block_size=(256, "tokens of a sequence"),
        micro_batch_size=(8, "sequences per training step"),
        tokens=(200, "tokens to generate in a turn"),
        megabytes=(20, "megabytes of text to tokenize in a turn"),
        rounds=(7, "measured turns of each"),
    )
    options.add(
        "only",
        ",".join(peers.PARTS),
        "what is timed, separated by commas",
        type=parts_of_peers,
    )


def parts_of_peers(text: str) -> list[str]:
    """Return the names of parts of the comparison that are separated by commas."""
    parts = text.split(",")
    for part in parts:
        if part not in peers.PARTS:
            raise argparse.ArgumentTypeError(f"{part}: give some of {', '.join(peers.PARTS)}")
    return parts


def of_quality(parser) -> None:
    options = Options(parser, device="cpu")
    options.add("config", Path("config/demo_cpu.py"), "what is trained", type=Path)
    options.add("rates", "2e-3,4e-3", "learning rates to begin with", type=rates)
    options.counts(seeds=(3, "seeds at the best rate, from 0"))


def of_costs(parser) -> None:
    models = "stems, stem:d_v or either+KEY=VALUE, with commas between (default: every stem)"
    parser.add_argument("--models", help=models)
    parser.add_argument("--size", choices=suites.PAPER, default="small", help="the paper's")
    parser.add_argument("--json", type=Path, help="write the figures there as well")


# name: (what it measures, its options, what runs it)
COMMANDS = {
    "step": ("training steps and forward passes; the default", of_step, step.run),
    "profile": ("what a step spends its time on, kernel by kernel", of_profile, profile.run),
    "kernels": ("bandwidth of the fused kernels", of_kernels, kernel_bandwidth.run),
    "decode": ("one-token decoding, with cache and without", of_decode, decode.run),
    "peers": ("speed beside nanoGPT and transformers", of_peers, peers.run),
    "quality": ("final loss beside GPT-2's, each at its best rate", of_quality, peer_quality.run),
    "costs": ("parameters, state and FLOPs of every model, counted", of_costs, costs.run),
}


def arguments(argv: list[str]):
    """The parsed command line; without a command it is `step`'s."""
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (what, add_options, _) in COMMANDS.items():
        add_options(commands.add_parser(name, help=what, description=what))
    if not argv or argv[0] not in (*COMMANDS, "-h", "--help"):
        argv = ["step", *argv]
    return parser.parse_args(argv)


def main():
    args = arguments(sys.argv[1:])
    with errors.one_line_errors():
        COMMANDS[args.command][2](args)


if __name__ == "__main__":
    main()
