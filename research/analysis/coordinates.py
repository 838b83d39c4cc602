"""`analyze.py mup`: the coordinate check of changes: training must change wide models as much as narrow ones.

Models of several widths train for a few steps. Under muP, the changes that this makes to every sublayer's output h, its
normalized input c, the direction k of a delta rewrite and the logits must have no slope in the logarithm of the width.
The same holds for the change that one more small step of each weight matrix makes to its product with the input, per
unit of the input.

The state X, the read x_in and the logit of the gate are not checked in delta streams. They depend on width by design: a
write adds a vector of length 1 to the state, whatever the width. Where no write has a direction, x_in must be level as
well.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import configurator
from configurator import collect_options, option
from model import MODEL_NAMES, build, model_class
from model.block import Site, State, Stream
from model.ddl import DeltaRewrite
from model.gpt import GPT
from research import plots
from research.analysis import common
from research.benchmarks.figures import MODEL_FILES, Figures
from training import optimizer
from training.config import TrainConfig
from utils import tables
from utils.provenance import compute_digest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The largest slope of a change that counts as level. A rate that is wrong by the root of the width changes it by 0.5.
SLOPE_BOUND = 0.15

TRAIN_STEPS = 4
LEARNING_RATE = 2e-3
NUM_PROBES = 3  # single steps whose changes of products are measured
PROBE_LEARNING_RATE = 1e-4

# A factor on the loss leaves Adam's step as it is, except for the influence of eps: without the factor, gradients of
# wide models would come close to it.
LOSS_SCALE = 1e4

VOCAB_SIZE = 64
HEAD_DIM = 32

# Keys that are set if the model has them. With conv_init=normal, c would start at 1/sqrt(d). Hidden sizes that do not
# grow with the width are the narrower side of their layers in wide models, so they must be in narrow ones as well.
OPTIONAL_KEYS = {"conv_init": "identity", "ddl_k_hidden_size": 64, "ddl_beta_hidden_size": 64}

# models that are shown without muP as well
SHOWN_WITHOUT_MUP = ("gpt-mha-rope", "DDL-gpt-mha-rope-CC")


# ---- what is recorded in a forward pass ----


class CoordinateStream(Stream):
    """Run the stream as it is, and record h, c, and k, or x_in where the write has no direction."""

    def __init__(self):
        self.coordinates: list[dict[str, torch.Tensor]] = []

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        x_in: torch.Tensor | tuple,
        c: torch.Tensor,
        cache: dict | None,
    ) -> State:
        coordinates = {"h": h, "c": c}
        if isinstance(site.write, DeltaRewrite):
            coordinates["k"] = site.write.direction(state, h, x_in, c)
        else:
            coordinates["x_in"] = x_in[0] if isinstance(x_in, tuple) else x_in
        self.coordinates.append(coordinates)
        return super().write(site, state, h, x_in, c, cache)


@torch.no_grad()
def record_coordinates(
    model: GPT, ids: torch.Tensor, targets: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """Return the logits of the targets (B, T, 1), then the coordinates of each site (B, T, d)."""
    stream = CoordinateStream()
    with model.through(stream):
        logits, _ = model(ids)
    return [{"logits": logits.gather(2, targets.unsqueeze(2))}, *stream.coordinates]


class ProductRecorder(TorchFunctionMode):
    """Record the RMS of x (W - W_old)^T over that of x at the last token, for every product x W^T.

    old_weights: name -> W_old (out, in)
    """

    def __init__(self, model: GPT, old_weights: dict[str, torch.Tensor]):
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.old_weights = old_weights
        self.sizes: list[tuple[str, float]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = self.names.get(id(args[1])) if func is F.linear else None
        if name in self.old_weights:
            x, weight = args[:2]
            x = x[:, -1:]
            change = root_mean_square(F.linear(x, weight - self.old_weights[name]))
            self.sizes.append((name, change / root_mean_square(x)))
        return func(*args, **(kwargs or {}))


def root_mean_square(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


# ---- training ----


def build_model(model_name: str, keys: dict, width: int) -> GPT:
    """Build a model of two blocks."""
    config_class = model_class(model_name).Config
    known_keys = collect_options(config_class)
    # `build` would refuse keys without effect, as hidden_size_base is without muP
    config = config_class(
        num_hidden_layers=2,
        num_attention_heads=width // HEAD_DIM,
        head_dim=HEAD_DIM,
        hidden_size=width,
        vocab_size=VOCAB_SIZE,
        block_size=8,
        hidden_size_base=64,
        **{key: value for key, value in OPTIONAL_KEYS.items() if key in known_keys},
        **keys,
    )
    return build(model_name, config)


def make_text(num_sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets, int64 (num_sequences, length): each token follows from the last."""
    first_tokens = torch.randint(0, VOCAB_SIZE, (num_sequences, 1))
    text = (first_tokens + torch.arange(length + 1) * 5) % VOCAB_SIZE
    return text[:, :-1], text[:, 1:]


def train(
    model: GPT,
    config: TrainConfig,
    ids: torch.Tensor,
    targets: torch.Tensor,
    num_steps: int,
    learning_rate: float,
) -> None:
    """Train a model with a new optimizer, for some steps on the same sequences."""
    optimizers = optimizer.build_optimizers(model, config)
    optimizer.apply_learning_rates(optimizers, {"lr": learning_rate})
    for _ in range(num_steps):
        _, loss = model(ids, targets)
        (LOSS_SCALE * loss).backward()
        for stepped_optimizer in optimizers:
            stepped_optimizer.step()
            stepped_optimizer.zero_grad()


def measure_changes(
    model_name: str, keys: dict, optimizer_name: str, width: int, seed: int
) -> dict[str, float]:
    """Return the RMS of all changes in a model, by name: "change of h", or "c_q.weight: linear"."""
    torch.manual_seed(seed)
    config = TrainConfig(
        optimizer=optimizer_name,
        learning_rate=1.0,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.95,
    )
    squares: dict[str, list[float]] = {}

    model = build_model(model_name, keys, width)
    ids, targets = make_text(2, 8)
    coordinates_before = record_coordinates(model, ids, targets)
    train(model, config, ids, targets, TRAIN_STEPS, LEARNING_RATE)
    coordinates_after = record_coordinates(model, ids, targets)
    for old, new in zip(coordinates_before, coordinates_after):
        for name in new:
            change = root_mean_square(new[name] - old[name])
            squares.setdefault(f"change of {name}", []).append(change**2)

    model.double()
    # the output layer is that of the logits, and muP scales them after the product
    old_weights = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and not name.endswith(("wte.weight", "lm_head.weight"))
    }
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(NUM_PROBES):
        # only the last token has a loss, because how similar tokens are depends on the width
        ids, targets = make_text(1, 2)
        targets = targets.clone()
        targets[:, :-1] = -1
        train(model, config, ids, targets, 1, PROBE_LEARNING_RATE)
        with torch.no_grad(), ProductRecorder(model, old_weights) as recorder:
            model(ids)
        for full_name, size in recorder.sizes:
            name = ".".join(full_name.split(".")[-2:])  # the same in every block
            squares.setdefault(f"{name}: linear", []).append(size**2)
        model.load_state_dict(state)
    return {name: math.sqrt(sum(values) / len(values)) for name, values in squares.items()}


# ---- the check ----


def fit_slope(widths: list[int], values: list[float]) -> float:
    """Return the least-squares slope of the logarithm of the values over that of the widths.

    It is nan if a value is 0, for something that does not change at all.
    """
    if min(values) <= 0:
        return math.nan
    return float(np.polyfit(np.log(widths), np.log(values), 1)[0])


def measure_slopes(
    model_name: str, keys: dict, optimizer_name: str, widths: list[int], num_seeds: int
) -> dict[str, dict]:
    """Return {name: {"values": RMS of the change at each width over seeds, "slope": their slope}}."""
    changes_by_width = [
        [
            measure_changes(model_name, keys, optimizer_name, width, seed)
            for seed in range(num_seeds)
        ]
        for width in widths
    ]
    slopes = {}
    for name in changes_by_width[0][0]:
        values = [
            math.prod(changes[name] for changes in seeds) ** (1 / num_seeds)
            for seeds in changes_by_width
        ]
        slopes[name] = {"values": values, "slope": fit_slope(widths, values)}
    return slopes


def find_not_level(changes: dict[str, dict]) -> dict[str, float]:
    """Return the slopes of those that change more, or less, in wide models than in narrow ones."""
    return {
        name: change["slope"]
        for name, change in changes.items()
        if not abs(change["slope"]) <= SLOPE_BOUND  # a comparison with nan is false
    }


def parse_case(case: str) -> tuple[str, dict]:
    """Return the model name and the keys of "model_name+key=value+...".

    Raises:
        ValueError: there is no such model, key or value
    """
    model_name, *assignments = case.split("+")
    if model_name not in MODEL_NAMES:
        raise ValueError(
            f"--models={case}: give one of {', '.join(MODEL_NAMES)}, with +key=value for keys of the model"
        )
    options = collect_options(model_class(model_name).Config)
    texts = dict(assignment.partition("=")[::2] for assignment in assignments)
    configurator.check_names(texts, options)
    keys = configurator.read_settings({}, texts, options)
    model_class(model_name).Config(**keys)  # raises if values contradict each other
    return model_name, keys


# ---- the table, the figure and the command ----


def split_slopes(row: dict) -> tuple[list[float], list[float]]:
    """Return the slopes of the changes of coordinates, and of those of single parameters."""
    coordinates = []
    parameters = []
    for name, change in row["changes"].items():
        slopes = coordinates if name.startswith("change of") else parameters
        slopes.append(change["slope"])
    return coordinates, parameters


def format_table(rows: list[dict]) -> str:
    """Return a table of the lowest and highest slopes of each model, and how many are not level."""
    cells = []
    for row in rows:
        ranges = [f"{min(slopes):+.2f} to {max(slopes):+.2f}" for slopes in split_slopes(row)]
        num_not_level = len(find_not_level(row["changes"]))
        cells.append(
            (
                row["model"],
                row["optimizer"],
                "muP" if row["mup"] else "plain",
                *ranges,
                f"{num_not_level} of {len(row['changes'])}",
            )
        )
    return tables.format_markdown(
        ("model", "", "", "h, c, k, x_in, logits", "parameters", "not level"), cells
    )


def draw(rows: list[dict]) -> "Figure":
    """Draw every slope as a point, with a panel for each optimizer and a line for each model."""
    optimizer_names = list(dict.fromkeys(row["optimizer"] for row in rows))
    labels = ("h, c, k, x_in, logits", "contribution of a parameter")
    height = max(0.6 + 0.16 * len(rows) / len(optimizer_names), 1.6)
    figure, axes = plots.make_panels(1, len(optimizer_names), height, labels, sharey=True)
    entries = {}
    for panel, optimizer_name in zip(axes[0], optimizer_names):
        panel_rows = [row for row in rows if row["optimizer"] == optimizer_name]
        entries["counts as level"] = panel.axvspan(-SLOPE_BOUND, SLOPE_BOUND, color="0.9")
        names = []
        for index, row in enumerate(panel_rows):
            name = row["model"].replace("-gpt-mha-rope", "")
            names.append(name if row["mup"] else f"{name}, without muP")
            for color, label, slopes in zip(plots.COLORS, labels, split_slopes(row)):
                [entries[label]] = panel.plot(
                    slopes, [-index] * len(slopes), "o", color=color, alpha=0.6
                )
        heights = [-index for index in range(len(panel_rows))]
        panel.set_yticks(heights, names, fontsize=6)
        panel.set(title=optimizer_name, xlabel="slope")
        panel.grid(visible=False, axis="y")
    plots.add_legend(figure, entries)
    return figure


@dataclass(frozen=True)
class Options(common.WidthOptions):
    """Models, and where the figures are stored."""

    models: str | None = option(
        None,
        "model names, or model_name+key=value, separated by commas (default: every model)",
    )
    seeds: int = option(3, "number of models per width", low=1)
    json: str = option("runs/mup.json", common.FIGURES_HELP)


def run(args: SimpleNamespace) -> None:
    """Measure what is missing in the file of figures; then print the table and draw the figure."""
    plots.use_print_style()  # a missing package should be noticed before anything is measured
    json_file = Path(args.json)
    widths = common.parse_widths(args.widths)
    optimizers = common.parse_optimizers(args.optimizers)
    models = args.models.split(",") if args.models else MODEL_NAMES
    cases = {case: parse_case(case) for case in models}
    code = compute_digest(
        *MODEL_FILES, "training/optimizer.py", "research/analysis/coordinates.py"
    )[:12]
    figures = Figures(
        json_file,
        torch.device("cpu"),
        {"widths": widths, "seeds": args.seeds},
        resume=True,
        code=code,
    )
    cases_and_mup = [(case, True) for case in cases]
    cases_and_mup += [(case, False) for case in cases if case in SHOWN_WITHOUT_MUP]
    rows = []
    for optimizer_name in optimizers:
        for case, mup in cases_and_mup:
            row = figures.find(model=case, optimizer=optimizer_name, mup=mup)
            if row is None:
                model_name, keys = cases[case]
                row = {
                    "model": case,
                    "optimizer": optimizer_name,
                    "mup": mup,
                    "changes": measure_slopes(
                        model_name, {**keys, "mup": mup}, optimizer_name, widths, args.seeds
                    ),
                }
                figures.add(row)
            print(
                f"{case}, {optimizer_name}, {'muP' if mup else 'plain'}: "
                f"not level: {find_not_level(row['changes'])}",
                flush=True,
            )
            rows.append(row)
    print(format_table(rows))
    out = json_file.with_suffix(".png")
    with plots.use_print_style():
        plots.save(draw(rows), out)
    print(f"wrote {json_file}, drew {out}")
