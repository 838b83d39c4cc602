"""`analyze.py mup`: the coordinate check of changes. Training must change wide models as much as narrow ones.

Models of several widths train for a few steps. Under muP, the changes that this makes to every sublayer's output h, its
normalized input c, the direction k of a delta rewrite and the logits must have no slope in the logarithm of the width.
Then every parameter makes one more small step by itself. The change of its layer's output is the contribution of the
parameter, which must have no slope either. This checks separately whether the learning rate of each parameter is too
low or too high.

The state X, the read x_in and the logit of the gate are not checked in delta streams. They depend on width by design: a
write adds a vector of length 1 to the state, whatever the width. To exclude their influence on what is checked, a
contribution is divided by the RMS of what its parameter is multiplied with, and c, h, k and logits are those of models
whose reads start as the mean over value channels. Where no write has a direction, x_in must be level as well.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import configurator
from model import MODEL_NAMES, build, model_class
from model.block import Site, State, Stream
from model.gpt import GPT
from model.options import collect_options
from research import plots
from research.benchmarks.figures import MODEL_FILES, Figures
from training import optimizer
from training.config import TrainConfig
from training.provenance import compute_digest
from utils import tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

FILE = "mup"  # default name of the file of figures

# The largest slope of a change that counts as level.
SLOPE_BOUND = 0.15

# The slope of what goes through a softmax over value channels, and how far from it is allowed. There a query acts on
# what tells the channels apart, which is part of the state: it starts at v_proj's bias, 1/sqrt(d), and then grows.
SOFTMAX_SLOPE = -0.25
SOFTMAX_SLOPE_BOUND = 0.5

# The vector of such a read has one number for each value channel. Whether the few changes have one sign is chance, and
# a norm removes what they have in common, so these contributions have no bound.
UNBOUNDED = ("compress.read: mul", "readout.read: mul")

TRAIN_STEPS = 4
LEARNING_RATE = 2e-3

# Steps whose contributions are measured. Only the last of their tokens has a loss, because how similar tokens are
# depends on the width.
NUM_PROBES = 3
PROBE_LEARNING_RATE = 1e-4
NUM_PROBE_TOKENS = 2

# A factor on the loss leaves Adam's step as it is, except for the influence of eps: without the factor, gradients of
# wide models would come close to it.
LOSS_SCALE = 1e4

VOCAB_SIZE = 64
HEAD_DIM = 32

# A smaller change is rounding error. It says nothing about the width, and does not count as level.
SMALLEST_CHANGE = 1e-8
# replaces 0, which has no logarithm
SMALLEST_POSITIVE = 1e-30

# Start values with which c does not depend on the width, for the streams that have the key: with conv_init=normal, c
# starts at 1/sqrt(d).
LEVEL_START = {"conv_init": "identity"}

# Hidden sizes that do not grow with the width. In wide models they are the narrower side of their layers, so they must
# be in narrow ones as well.
HIDDEN_SIZES = {"ddl_k_hidden_size": 64, "ddl_beta_hidden_size": 64}

# models that are shown without muP as well
SHOWN_WITHOUT_MUP = ("gpt-mha-rope", "DDL-gpt-mha-rope-CC")

MATRIX_PRODUCTS = ("linear", "matmul")
NORMS = ("rms_norm",)

# Functions that a contribution is followed through: after a sum or a scaling it is what the layer puts out.
SUMS = {"add", "radd", "sub", "neg", "mul", "rmul", "div", "truediv", "sum", "mean"}
# Functions that move or copy numbers, and leave the size of a contribution as it is.
MOVES = {
    "to",
    "float",
    "flatten",
    "unflatten",
    "reshape",
    "view",
    "unsqueeze",
    "squeeze",
    "transpose",
    "cat",
    "getitem",
    "new_zeros",
}


# ---- contributions of single parameters ----


def root_mean_square(x: torch.Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


def list_float_tensors(tree: object) -> list[torch.Tensor]:
    """Return the floating-point tensors of a nested structure."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def last_token(x: torch.Tensor) -> torch.Tensor:
    """Return the last token of a tensor (1, T, ...); any other tensor as it is."""
    return x[:, -1:] if x.ndim > 2 and x.shape[0] == 1 else x


@dataclass
class Contribution:
    """What the change of one parameter does to the output of a function that combines it with data."""

    # the parameter's full name
    parameter: str

    # the function in which the parameter meets data, and after it a norm or softmax, if any
    function: str

    # RMS of what the parameter is multiplied with
    unit: float

    # RMS of the change of the output, divided by the unit
    size: float


class Call(NamedTuple):
    """A call of a torch function."""

    function: Callable
    args: tuple
    kwargs: dict

    @property
    def arguments(self) -> tuple[tuple, dict]:
        return self.args, self.kwargs

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "").strip("_")


class Twin(NamedTuple):
    """A tensor that depends on parameters, and its values if one of them had not made its step."""

    # a reference, so that no other tensor gets the same id
    tensor: torch.Tensor

    # parameter name -> the tensor with the old value of that parameter
    old_tensors: dict[str, torch.Tensor]

    # parameter name -> RMS of the other parameters that it was multiplied with
    units: dict[str, float]

    # parameter name -> its contribution; None for a tensor that is made of parameters alone
    contributions: dict[str, Contribution] | None = None


class ContributionRecorder(TorchFunctionMode):
    """Record, in a forward pass, what the change of each parameter alone does where it meets data.

    No list of layers is needed. Every torch function that combines a parameter, or what was made of parameters alone,
    with data is evaluated again with the old value. The difference is recorded, per unit of the data if it grows with
    them, and followed through sums, scaling, and functions that depend on directions and differences alone: a softmax,
    and a norm right after a matrix product.

    Args:
        parameters: name -> (parameter, its old value)
    """

    def __init__(self, parameters: dict[str, tuple[torch.Tensor, torch.Tensor]]):
        super().__init__()
        self.contributions: list[Contribution] = []
        self.twins = {
            id(parameter): Twin(parameter, {name: old_value}, {name: 1.0})
            for name, (parameter, old_value) in parameters.items()
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = Call(func, args, kwargs or {})
        output = func(*args, **call.kwargs)
        tensors = [x for x in tree_leaves(call.arguments) if isinstance(x, torch.Tensor)]
        twins = [self.twins[id(x)] for x in tensors if id(x) in self.twins]
        weights = [twin for twin in twins if twin.contributions is None]
        if not twins or not list_float_tensors(output):
            return output
        if len(weights) == len(tensors):
            self.record_weights(call, output, weights)
        elif weights and isinstance(output, torch.Tensor):
            self.record_product(call, output, weights)
        elif not weights and len(twins) == len(tensors) and isinstance(output, torch.Tensor):
            self.follow(call, output, twins)
        return output

    def recompute(
        self, call: Call, twins: list[Twin], name: str | None, data_scale: float = 1.0
    ) -> list[torch.Tensor]:
        """Return the call's floating-point outputs with the old value of the parameter `name`.

        Args:
            twins: the arguments that depend on parameters
            name: None for the current values of all parameters
            data_scale: factor on all other floating-point arguments
        """
        replacements = {id(twin.tensor): twin.old_tensors.get(name, twin.tensor) for twin in twins}

        def replace(x: object) -> object:
            if not isinstance(x, torch.Tensor) or id(x) in replacements:
                return replacements.get(id(x), x)
            if data_scale != 1 and x.is_floating_point():
                return x * data_scale
            return x

        args, kwargs = tree_map(replace, call.arguments)
        return list_float_tensors(call.function(*args, **kwargs))

    def record_weights(self, call: Call, output: object, weights: list[Twin]) -> None:
        """Give a twin to each output of a function of parameters alone."""
        old_outputs = {
            name: self.recompute(call, weights, name)
            for twin in weights
            for name in twin.old_tensors
        }
        units = {}
        for name in old_outputs:
            units[name] = max(twin.units.get(name, 0.0) for twin in weights)
            if call.name in ("mul", "rmul"):
                units[name] *= math.prod(
                    root_mean_square(twin.tensor)
                    for twin in weights
                    if name not in twin.old_tensors
                )
        for index, tensor in enumerate(list_float_tensors(output)):
            old_tensors = {name: outputs[index] for name, outputs in old_outputs.items()}
            self.twins[id(tensor)] = Twin(tensor, old_tensors, units)

    def record_product(self, call: Call, output: torch.Tensor, weights: list[Twin]) -> None:
        """Record the contribution of each parameter in a function that combines it with data."""
        weight_ids = {id(twin.tensor) for twin in weights}
        data = [x for x in list_float_tensors(call.arguments) if id(x) not in weight_ids]
        old_tensors = {}
        contributions = {}
        units = {}
        for twin in weights:
            for name, weight_unit in twin.units.items():
                [old_output] = self.recompute(call, weights, name)
                unit = weight_unit
                size = root_mean_square(last_token(output - old_output))
                if data and size:
                    # the power of the data that the contribution is proportional to, by doubling them
                    [doubled] = self.recompute(call, weights, None, data_scale=2.0)
                    [old_doubled] = self.recompute(call, weights, name, data_scale=2.0)
                    doubled_size = root_mean_square(last_token(doubled - old_doubled))
                    power = round(math.log2(max(doubled_size / size, 1)))
                    data_rms = root_mean_square(torch.cat([last_token(x).flatten() for x in data]))
                    unit *= data_rms**power
                old_tensors[name] = old_output
                contributions[name] = Contribution(name, call.name, unit, size / unit)
                units[name] = unit
        self.contributions.extend(contributions.values())
        self.twins[id(output)] = Twin(output, old_tensors, units, contributions)

    def follow(self, call: Call, output: torch.Tensor, twins: list[Twin]) -> None:
        """Update contributions that pass a further function to what they are after it."""
        contributions = {}
        for twin in twins:
            contributions.update(twin.contributions)
        after_matrix_products = all(
            contribution.function in MATRIX_PRODUCTS for contribution in contributions.values()
        )
        normalizes = call.name == "softmax" or (call.name in NORMS and after_matrix_products)
        if not (normalizes or call.name in SUMS or call.name in MOVES):
            return
        old_tensors = {name: self.recompute(call, twins, name)[0] for name in contributions}
        if call.name not in MOVES:
            for name, contribution in contributions.items():
                if normalizes:
                    contribution.unit = 1.0
                    contribution.function = f"{contribution.function}, {call.name}"
                elif call.name in ("mul", "rmul"):
                    factors = [
                        root_mean_square(last_token(twin.tensor))
                        for twin in twins
                        if name not in twin.old_tensors
                    ]
                    contribution.unit *= math.prod(factors) or 1.0
                change = root_mean_square(last_token(output - old_tensors[name]))
                contribution.size = change / contribution.unit
        self.twins[id(output)] = Twin(output, old_tensors, {}, contributions)


# ---- models and their training ----


class CoordinateStream(Stream):
    """Run the stream as it is, and record h, c, and k, or x_in where the write has no direction."""

    def __init__(self):
        self.coordinates: list[dict[str, torch.Tensor]] = []

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        c: torch.Tensor,
        x_in: torch.Tensor | tuple,
        cache: dict | None,
    ) -> tuple[State, torch.Tensor | None]:
        coordinates = {"h": h, "c": c}
        if hasattr(site.write, "compute_k_hat"):
            coordinates["k"] = site.write.compute_k_hat(state, h, x_in, c)
        else:
            coordinates["x_in"] = x_in[0] if isinstance(x_in, tuple) else x_in
        self.coordinates.append(coordinates)
        return super().write(site, state, h, c, x_in, cache)


@torch.no_grad()
def record_coordinates(
    model: GPT, ids: torch.Tensor, targets: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """Return the logits of the targets (B, T, 1), then the coordinates of each site (B, T, d)."""
    stream = CoordinateStream()
    with model.through(stream):
        logits, _ = model(ids)
    return [{"logits": logits.gather(2, targets.unsqueeze(2))}, *stream.coordinates]


def build_model(model_name: str, keys: dict, width: int, start_keys: dict) -> GPT:
    """Build a model of two blocks.

    Args:
        keys: of the model's configuration
        start_keys: further keys, which are set only if the model has them
    """
    known_keys = vars(model_class(model_name).Config())
    optional_keys = {
        key: value for key, value in {**HIDDEN_SIZES, **start_keys}.items() if key in known_keys
    }
    return build(
        model_name,
        num_hidden_layers=2,
        num_attention_heads=width // HEAD_DIM,
        head_dim=HEAD_DIM,
        hidden_size=width,
        vocab_size=VOCAB_SIZE,
        block_size=8,
        hidden_size_base=64,
        **optional_keys,
        **keys,
    )


def make_text(num_sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets, int64 (num_sequences, length): each token follows from the last."""
    first_tokens = torch.randint(0, VOCAB_SIZE, (num_sequences, 1))
    text = (first_tokens + torch.arange(length + 1) * 5) % VOCAB_SIZE
    return text[:, :-1], text[:, 1:]


def train_step(
    model: GPT,
    optimizers: list[torch.optim.Optimizer],
    learning_rate: float,
    ids: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    optimizer.apply_learning_rates(optimizers, {"lr": learning_rate})
    _, loss = model(ids, targets)
    (LOSS_SCALE * loss).backward()
    for stepped_optimizer in optimizers:
        stepped_optimizer.step()
        stepped_optimizer.zero_grad()


def train(model: GPT, config: TrainConfig, ids: torch.Tensor, targets: torch.Tensor) -> None:
    """Train a model for TRAIN_STEPS steps on the same sequences."""
    optimizers = optimizer.build_optimizers(model, config, muon_dtype=torch.float32)
    for _ in range(TRAIN_STEPS):
        train_step(model, optimizers, LEARNING_RATE, ids, targets)


def measure_contributions(
    model: GPT, config: TrainConfig, ids: torch.Tensor, targets: torch.Tensor
) -> list[Contribution]:
    """Return what one step of a new optimizer contributes, by parameter; the step is undone.

    ids, targets: (1, T), of which only the last token has a loss
    """
    parameters = {
        name: (parameter, parameter.detach().clone())
        for name, parameter in model.named_parameters()
    }
    optimizers = optimizer.build_optimizers(model, config, muon_dtype=torch.float32)
    targets = targets.clone()
    targets[:, :-1] = -1
    train_step(model, optimizers, PROBE_LEARNING_RATE, ids, targets)
    with torch.no_grad(), ContributionRecorder(parameters) as recorder:
        model(ids)
    with torch.no_grad():
        for parameter, old_value in parameters.values():
            parameter.copy_(old_value)
    return recorder.contributions


def drop_block_of(name: str) -> str:
    """Return a parameter's name without its block: "c_q.weight", the same in every block."""
    return ".".join(name.split(".")[-2:])


# ---- the check ----


def measure_sizes(
    model_name: str, keys: dict, optimizer_name: str, width: int, seed: int
) -> dict[str, float]:
    """Return the RMS of all changes and contributions in models of one width.

    Their names are "change of h", or a parameter and the function in which it meets data,
    "c_q.weight: linear".
    """
    torch.manual_seed(seed)
    config = TrainConfig(
        optimizer=optimizer_name,
        learning_rate=1.0,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.95,
    )
    squares: dict[str, list[float]] = {}

    # changes of the coordinates, by training
    model = build_model(model_name, keys, width, LEVEL_START)
    ids, targets = make_text(2, 8)
    coordinates_before = record_coordinates(model, ids, targets)
    train(model, config, ids, targets)
    coordinates_after = record_coordinates(model, ids, targets)
    for old, new in zip(coordinates_before, coordinates_after):
        for name in new:
            change = root_mean_square(new[name] - old[name])
            squares.setdefault(f"change of {name}", []).append(change**2)

    # contributions of the parameters, in a model that starts as it does by default
    default_model = build_model(model_name, keys, width, {})
    if vars(model.config) != vars(default_model.config):
        model = default_model
        train(model, config, *make_text(2, 8))
    model.double()
    for _ in range(NUM_PROBES):
        probe_ids, probe_targets = make_text(1, NUM_PROBE_TOKENS)
        for contribution in measure_contributions(model, config, probe_ids, probe_targets):
            name = f"{drop_block_of(contribution.parameter)}: {contribution.function}"
            squares.setdefault(name, []).append(contribution.size**2)

    # parameters without any contribution
    contributing = {name.partition(":")[0] for name in squares}
    for full_name, parameter in model.named_parameters():
        name = drop_block_of(full_name)
        if parameter.requires_grad and name not in contributing:
            squares[f"{name}: receives no data"] = [0.0]
    return {name: math.sqrt(sum(values) / len(values)) for name, values in squares.items()}


def fit_slope(widths: list[int], values: list[float]) -> float:
    """Return the least-squares slope of the logarithm of the values over that of the widths."""
    return float(np.polyfit(np.log(widths), np.log(values), 1)[0])


def measure_slopes(
    model_name: str, keys: dict, optimizer_name: str, widths: list[int], num_seeds: int
) -> dict[str, dict]:
    """Return, for each change and contribution, its size at each width and their slope.

    Returns:
        {name: {"values": geometric means over seeds, "slope": slope}}
    """
    sizes_by_width = [
        [measure_sizes(model_name, keys, optimizer_name, width, seed) for seed in range(num_seeds)]
        for width in widths
    ]
    slopes = {}
    for name in sizes_by_width[0][0]:
        values = []
        for sizes_by_seed in sizes_by_width:
            positive_sizes = [max(sizes[name], SMALLEST_POSITIVE) for sizes in sizes_by_seed]
            values.append(math.exp(np.log(positive_sizes).mean()))
        slopes[name] = {"values": values, "slope": fit_slope(widths, values)}
    return slopes


def get_slope_bound(name: str) -> float:
    """Return how far the slope of a change or contribution may be from the expected one."""
    if name in UNBOUNDED:
        return math.inf
    return SOFTMAX_SLOPE_BOUND if "softmax" in name else SLOPE_BOUND


def find_not_level(changes: dict[str, dict]) -> dict[str, float]:
    """Return the slopes of those that change more, or less, in wide models than in narrow ones.

    The slope is nan for what does not change at all.
    """
    not_level = {}
    for name, change in changes.items():
        slope = change["slope"] if min(change["values"]) > SMALLEST_CHANGE else math.nan
        expected_slope = SOFTMAX_SLOPE if "softmax" in name else 0.0
        # a comparison with nan is false
        if not abs(slope - expected_slope) <= get_slope_bound(name):
            not_level[name] = slope
    return not_level


# Settings with which a variant has other parameters than by default, as --models takes them.
OTHER_CASES = (
    "AttnRes-gpt-mha-rope+attn_res_blocks=2",
    "AttnRes-gpt-mha-rope+attn_res_form=delta",
    "DDL-gpt-mha-rope+ddl_map=v",
    "DDL-gpt-mha-rope+ddl_erase_gate=own",
    "DDL-gpt-mha-rope+ddl_update=erase_only",
    "DDL-gpt-mha-rope-CC+ddl_cc_read=folded+ddl_beta_single_linear=False",
    "DDL-gpt-mha-rope-CC+ddl_map=v+ddl_k_branch=attention",
    "DDL-gpt-mha-rope-CC+ddl_map=v+ddl_k_norm=shifted+ddl_k_input=mean+ddl_beta_input=mean"
    "+ddl_cc_read=folded",
    "DDL-gpt-mha-rope-CC+ddl_map=v+ddl_k_input=flat+ddl_beta_input=flat+ddl_cc_read=folded",
    "DDL-gpt-mha-rope-CC-EC+ddl_state_dv_shortconv_causal=True+ddl_state_shortconv_kernel_size=3",
    "DDL-vdim1-gpt-mha-rope+ddl_map=v",
    "DDL-vdim1-gpt-mha-rope+ddl_erase_gate=own+ddl_beta_single_linear=False",
    "GatedResidual-gpt-mha-rope+hc_streams=2+gated_residual_rank=3",
    "HC-gpt-mha-rope+hc_dynamic=False",
    "LAuReL-gpt-mha-rope+laurel_form=rw",
    "Lambdas-gpt-mha-rope+lambda_values=head+lambda_value_embeddings=True",
    "Lambdas-gpt-mha-rope+lambda_input=False+lambda_values=none+lambda_skips=True",
    "Lambdas-gpt-mha-rope+lambda_input=False+lambda_values=none+lambda_gain=True",
    "MGT-gpt-mha+mgt_arm=ddl",
    "MGT-gpt-mha+mgt_arm=mhc",
    "MGT-gpt-mha+mgt_arm=standard",
    "MGT-gpt-mha+mgt_arm=additive",
    "MUDD-gpt-mha-rope+mudd_ways=r",
    "conv-gpt-mha-rope+canon=ABCD",
    "gpt-mha-rope+residual_branch_mult=0.5",
    "mHC-gpt-mha-rope+mhc_mix=identity+mhc_readout=sigmoid",
    "mHC-gpt-mha-rope+mhc_mix=permutations",
    "mHC-gpt-mha-rope+mhc_mix=kronecker",
    "mHC-gpt-mha-rope+mhc_mix=orthogonal",
    "mHC-gpt-mha-rope+mhc_readout=mean+mhc_read_eps=0.01+mhc_read_dtype=state+mhc_write_dtype=state"
    "+mhc_scale_init=1.0+mhc_bias_init=zeros+mhc_maps_init_std=0.02",
    "mHC-gpt-mha-rope+mhc_mix=identity+mhc_readout=sigmoid+mhc_read_eps=0.01+mhc_write_eps=0.02"
    "+mhc_write_magnitude=1.5+mhc_norm_eps=1e-05+mhc_readout_bias_init=mean",
    "wide-gpt-mha-rope+wide_read=cc",
)


def list_cases() -> list[str]:
    """Return every variant, followed by its other settings."""
    return [
        case
        for name in MODEL_NAMES
        for case in (name, *(other for other in OTHER_CASES if other.partition("+")[0] == name))
    ]


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


# ---- the table and the figure ----


def is_coordinate(name: str) -> bool:
    """Return whether a name is that of a coordinate's change, and not of a contribution."""
    return name.startswith("change")


def format_range(slopes: list[float]) -> str:
    return f"{min(slopes):+.2f} to {max(slopes):+.2f}"


def format_table(rows: list[dict]) -> str:
    """Return a table of the lowest and highest slopes of each model, and how many are not level."""
    cells = []
    for row in rows:
        slopes = {name: change["slope"] for name, change in row["changes"].items()}
        of_coordinates = [slope for name, slope in slopes.items() if is_coordinate(name)]
        of_parameters = [slope for name, slope in slopes.items() if not is_coordinate(name)]
        cells.append(
            (
                row["model"],
                row["optimizer"],
                "muP" if row["mup"] else "plain",
                format_range(of_coordinates),
                format_range(of_parameters),
                f"{len(find_not_level(row['changes']))} of {len(slopes)}",
            )
        )
    return tables.format_markdown(
        ("model", "", "", "h, c, k, x_in, logits", "parameters", "not level"), cells
    )


COORDINATES_LABEL = "h, c, k, x_in, logits"
PARAMETERS_LABEL = "contribution of a parameter"
# abbreviations of model names in the figure
ABBREVIATIONS = {"-gpt-mha-rope": "", "-gpt-mha": "", "+ddl_": " ", "+": " "}


def abbreviate(row: dict) -> str:
    """Return the label of a row in the figure."""
    label = row["model"]
    if not row["mup"]:
        label += ", without muP"
    for text, short_text in ABBREVIATIONS.items():
        label = label.replace(text, short_text)
    return label


def plot_slopes(
    panel: "Axes", rows: list[dict], of_coordinates: bool, marker: str, color: str
) -> "Line2D":
    """Draw the slopes of coordinates, or of parameters, as points; the first row is at the top.

    Returns:
        The artist for the legend.
    """
    slopes = []
    heights = []
    for index, row in enumerate(rows):
        for name, change in row["changes"].items():
            if is_coordinate(name) == of_coordinates:
                slopes.append(change["slope"])
                heights.append(-index)
    (points,) = panel.plot(slopes, heights, marker, linestyle="", color=color, alpha=0.6)
    return points


def draw(rows: list[dict]) -> "Figure":
    """Draw every slope as a point, with a panel for each optimizer and a line for each model."""
    optimizer_names = list(dict.fromkeys(row["optimizer"] for row in rows))
    figure, axes = plots.make_panels(
        1,
        len(optimizer_names),
        0.6 + 0.16 * len(rows) / len(optimizer_names),
        [COORDINATES_LABEL, PARAMETERS_LABEL],
        sharey=True,
    )
    entries = {}
    for panel, name in zip(axes[0], optimizer_names):
        panel_rows = [row for row in rows if row["optimizer"] == name]
        entries["counts as level"] = panel.axvspan(-SLOPE_BOUND, SLOPE_BOUND, color="0.9")
        entries[COORDINATES_LABEL] = plot_slopes(panel, panel_rows, True, "D", plots.COLORS[1])
        entries[PARAMETERS_LABEL] = plot_slopes(panel, panel_rows, False, "o", plots.COLORS[0])
        heights = [-index for index in range(len(panel_rows))]
        panel.set_yticks(heights, [abbreviate(row) for row in panel_rows], fontsize=6)
        panel.set(title=name, xlabel="slope")
        panel.grid(visible=False, axis="y")
    plots.add_legend(figure, entries)
    return figure


# ---- the command ----


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        help="model names, or model_name+key=value, separated by commas (default: every model, each "
        "followed by its other settings)",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of models per width (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    """Measure what is missing in the file of figures; then print the table and draw the figure."""
    plots.use_print_style()  # a missing package should be noticed before anything is measured
    cases = args.models.split(",") if args.models else list_cases()
    parsed_cases = {case: parse_case(case) for case in cases}
    code = compute_digest(
        *MODEL_FILES, "training/optimizer.py", "research/analysis/coordinates.py"
    )[:12]
    figures = Figures(
        args.json,
        torch.device("cpu"),
        {"widths": args.widths, "seeds": args.seeds},
        resume=True,
        code=code,
    )
    cases_and_mup = [(case, True) for case in cases]
    cases_and_mup += [(case, False) for case in cases if case in SHOWN_WITHOUT_MUP]
    rows = []
    for optimizer_name in args.optimizers:
        for case, mup in cases_and_mup:
            row = figures.find(model=case, optimizer=optimizer_name, mup=mup)
            if row is None:
                model_name, keys = parsed_cases[case]
                row = {
                    "model": case,
                    "optimizer": optimizer_name,
                    "mup": mup,
                    "changes": measure_slopes(
                        model_name, {**keys, "mup": mup}, optimizer_name, args.widths, args.seeds
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
    out = args.json.with_suffix(".png")
    with plots.use_print_style():
        plots.save(draw(rows), out)
    print(f"wrote {args.json}, drew {out}")
