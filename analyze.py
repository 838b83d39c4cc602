"""Look inside models.

    python analyze.py mup [--model=DDL-gpt-mha-rope-CC] [--widths=64,128,256,512] [--steps=5] [--out=FILE]

mup: the coordinate check. Models of several widths train a few steps; under muP the size of a sublayer's output h, of
its normed input c and of the logits must not grow with width. The state X, the read x_in and the gate's logit are not
width-flat by design and are left out.
"""

import math
from pathlib import Path
from types import SimpleNamespace

import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split
import numpy as np
import torch

import tables
from benchmarks import transfer
from model import STEMS, build
from report import pyplot
from training import optimizer
from training.residual_statistics import Watched

QUANTITIES = ("h", "c", "logits")


def coordinate_sizes(stem: str, width: int, mup: bool, steps: int, learning_rate: float) -> dict[str, float]:
    """Root mean square of h, c and logits after `steps` AdamW steps on one batch, at hidden_size `width`."""
    torch.manual_seed(0)
    size = {"vocab_size": 64, "block_size": 32, "num_hidden_layers": 2, "num_attention_heads": width // 32}
    model = build(stem, **size, head_dim=32, hidden_size=width, mup=mup, hidden_size_base=64)
    settings = SimpleNamespace(learning_rate=learning_rate, weight_decay=0.0, optimizer="adamw", beta1=0.9, beta2=0.95)
    optimizers = optimizer.build_optimizers(model, settings)
    optimizer.set_learning_rate(optimizers, learning_rate)
    # A stream with something to learn: each token follows from the one before.
    ids = torch.randint(0, 64, (8, 1)) + torch.arange(33) * 5
    ids, targets = ids[:, :-1] % 64, ids[:, 1:] % 64
    for _ in range(steps):
        _, loss = model(ids, targets)
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    squares: dict[str, list[float]] = {name: [] for name in QUANTITIES}

    def seen(_site, quantities):
        for name in ("h", "c"):
            squares[name].append(quantities[name].square().mean().item())

    with torch.no_grad(), model.through(Watched(seen)):
        squares["logits"].append(model(ids)[0].square().mean().item())
    return {name: math.sqrt(sum(values) / len(values)) for name, values in squares.items()}


def slope(widths: list[int], sizes: list[float]) -> float:
    """Least-squares slope of log size over log width."""
    return float(np.polyfit(np.log(widths), np.log(sizes), 1)[0])


def coordinate_check(stem: str, widths: list[int], steps: int, learning_rate: float) -> dict:
    """{(mup, quantity): ([size at each width], slope)} with and without muP."""
    result = {}
    for mup in (True, False):
        sizes = [coordinate_sizes(stem, width, mup, steps, learning_rate) for width in widths]
        for quantity in QUANTITIES:
            values = [s[quantity] for s in sizes]
            result[mup, quantity] = values, slope(widths, values)
    return result


def draw(result: dict, widths: list[int], title: str, out: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    for (mup, quantity), (values, grade) in result.items():
        axes[0 if mup else 1].plot(widths, values, "o-", label=f"{quantity} (slope {grade:+.2f})")
    for panel, name in zip(axes, ("with muP", "without")):
        panel.set(title=f"{title}, {name}", xlabel="hidden_size", xscale="log", yscale="log", xticks=widths)
        panel.minorticks_off()
        panel.set_xticklabels(map(str, widths))
        panel.grid(alpha=0.3)
        panel.legend()
    axes[0].set_ylabel("root mean square after training")
    figure.savefig(out, dpi=120)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return text.split(",")


def check_widths(widths: list[int]) -> None:
    """ValueError: fewer than two, or not heads of 32 features."""
    if len(widths) < 2 or any(width < 32 or width % 32 for width in widths) or sorted(set(widths)) != widths:
        given = ",".join(map(str, widths))
        raise ValueError(f"--widths={given}: give two or more multiples of 32, rising, separated by commas")


def add_transfer(commands) -> None:
    parser = commands.add_parser("transfer", help="best learning rate over widths", description=transfer.__doc__)
    add = parser.add_argument
    add("--model", choices=STEMS, default="DDL-gpt-mha-rope-CC")
    add("--dataset", default="python_stdlib", help="folder of token shards (default: %(default)s)")
    add("--widths", type=numbers, default="64,128,256,512", help="the first is muP's base (default: %(default)s)")
    add("--optimizers", type=names, default="adamw,muon", help="(default: %(default)s)")
    add("--steps", type=int, default=100, help="optimizer steps, the first fifth warm-up (default: %(default)s)")
    add("--layers", type=int, default=2, help="(default: %(default)s)")
    add("--block_size", type=int, default=64, help="tokens of a sequence (default: %(default)s)")
    add("--batch_size", type=int, default=4, help="sequences of a step (default: %(default)s)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", type=Path, default=Path("runs/mup_transfer.json"), help="goes on from there (default: %(default)s)")


def main():
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    mup = commands.add_parser("mup", help="coordinate check over widths")
    mup.add_argument("--model", choices=STEMS, default="DDL-gpt-mha-rope-CC")
    mup.add_argument("--widths", default="64,128,256,512", help="multiples of 32")
    mup.add_argument("--steps", type=int, default=5)
    mup.add_argument("--learning_rate", type=float, default=1e-2)
    mup.add_argument("--out", type=Path, default=Path("runs/mup.png"), help="(default: %(default)s)")
    add_transfer(commands)
    args = parser.parse_args()
    if args.command == "transfer":
        with configurator.one_line_errors():
            check_widths(args.widths)
            transfer.run(args)
        return
    with configurator.one_line_errors():
        widths = [int(width) for width in args.widths.split(",")]
        if len(widths) < 2 or any(width < 32 or width % 32 for width in widths):
            raise ValueError(f"--widths={args.widths}: give two or more multiples of 32, separated by commas")
        pyplot()  # a missing package should be known before the work
        args.out.parent.mkdir(parents=True, exist_ok=True)
    result = coordinate_check(args.model, widths, args.steps, args.learning_rate)
    rows = [
        ("muP" if with_mup else "plain", quantity, *(f"{value:.4f}" for value in values), f"{grade:+.3f}")
        for (with_mup, quantity), (values, grade) in result.items()
    ]
    print(tables.markdown(("", "", *widths, "slope"), rows))
    with configurator.one_line_errors():
        draw(result, widths, args.model, args.out)
    print(f"drew {args.out}")


if __name__ == "__main__":
    main()
