"""`analyze.py mup`: the coordinate check of changes. Training must change as much in wide models as in narrow ones.

Models of several widths train a few steps. Under muP the changes that this makes to every sublayer's output h, its
normed input c, the direction k of a delta rewrite and the logits must have no slope in the logarithm of the width. Then
every parameter makes one more step by itself, a small one: the change of what its layer puts out is its contribution,
with no slope either. So each parameter's learning rate is held to its own measure, from both sides.

Left out in delta streams, for they are not level with width by design: the state X and the read x_in, to which a write
adds a vector of length 1, whatever the width, and the gate's logit. So that these do not count, a contribution is per
unit of what its parameter is multiplied with, and c, h, k and logits are those of models whose reads start as the mean
over columns. Where no write has a direction, x_in must be level as well.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import configurator
from model import MODEL_NAMES, build, model_class
from model.block import Stream
from model.options import collect_options
from research import plots
from research.benchmarks.figures import MODEL_FILES, Figures
from training import optimizer
from training.provenance import compute_digest
from utils import tables

BOUND = 0.15  # largest slope of a change that counts as level
# Through a softmax over columns: the middle, and how far from it. What a query does there is as large as what tells
# columns apart, which is part of the state: it starts at v_proj's bias, 1/sqrt(d), and then grows.
SOFTMAX, SOFTMAX_BOUND = -0.25, 0.5
# A read's vector has a number a column. Whether their few changes have one sign is chance, and a norm takes away what
# is common to them: they are not held to anything.
VECTORS = "compress.read: mul", "readout.read: mul"
STEPS, LEARNING_RATE = 4, 2e-3
PROBES, PROBE_RATE = 3, 1e-4  # steps whose contributions are measured
PROBE_TOKENS = 2  # of which the last alone has a loss: how alike tokens are depends on width
LOSS_SCALE = 1e4  # leaves Adam's step as it is, but for its eps, which gradients of wide models would come near
VOCABULARY = 64
NOTHING = (
    1e-8  # what is smaller is rounding: nothing has been measured, which does not count as level
)
SMALLEST = 1e-30  # has a logarithm where 0 has none
LEVEL_START = {
    "conv_init": "identity"
}  # where a stream has the key: "normal" starts c at 1/sqrt(d)
# Layers between a fixed number of features and d are not so before they are the narrower ones.
NARROW = {"ddl_k_hidden_size": 64, "ddl_beta_hidden_size": 64}
CONTRAST = ("gpt-mha-rope", "DDL-gpt-mha-rope-CC")  # shown without muP as well

MATRICES, NORMS = ("linear", "matmul"), ("rms_norm",)
# Functions that a contribution is followed through: after a sum or a scaling it is what the layer puts out.
SUMS = {"add", "radd", "sub", "neg", "mul", "rmul", "div", "truediv", "sum", "mean"}
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
}
MOVES |= {"cat", "getitem", "new_zeros"}


def root_mean_square(x) -> float:
    return x.detach().double().square().mean().sqrt().item()


class Twin(NamedTuple):
    """A tensor that depends on parameters, and the same with one of them as it was before the step, by its name.

    units: RMS of the other parameters it was multiplied with. found: where its contributions are noted; None for what
    is made of parameters alone and has met no data yet.
    """

    tensor: torch.Tensor  # kept, so that no other gets its id
    before: dict[str, torch.Tensor]
    units: dict[str, float]
    found: dict[str, dict] | None = None


class Contributions(TorchFunctionMode):
    """Watches a forward pass, and notes in `found` what each parameter's change alone does where it meets data.

    before: {name: (parameter, its value before)}. It needs no list of layers: every torch function that combines a
    parameter, or what was made of parameters alone, with data is evaluated again with the old value. The difference is
    noted, per unit of the data where it grows with them, and followed through sums, scaling and what looks at
    directions and differences alone: a softmax, and a norm right after a matrix product.
    """

    def __init__(self, before: dict):
        super().__init__()
        self.found: list[dict] = []
        self.twins = {id(p): Twin(p, {name: old}, {name: 1.0}) for name, (p, old) in before.items()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = func, args, kwargs or {}
        out = func(*args, **call[2])
        tensors = [x for x in tree_leaves(call[1:]) if isinstance(x, torch.Tensor)]
        known = [self.twins[id(x)] for x in tensors if id(x) in self.twins]
        weights = [twin for twin in known if twin.found is None]
        if not known or not floats(out):
            return out
        if len(weights) == len(tensors):
            self.combine(call, out, weights)
        elif weights:
            self.meet(call, out, weights)
        elif len(known) == len(tensors) and isinstance(out, torch.Tensor):
            self.follow(call, out, known)
        return out

    def again(
        self, call, replaced: list[Twin], name: str | None, scale: float = 1.0
    ) -> list[torch.Tensor]:
        """The call's floating-point results with the parameter `name` as before, and data times `scale`."""
        old = {id(twin.tensor): twin.before.get(name, twin.tensor) for twin in replaced}

        def other(x):
            if not isinstance(x, torch.Tensor) or id(x) in old:
                return old.get(id(x), x)
            return x * scale if scale != 1 and x.is_floating_point() else x

        func, args, kwargs = call
        return floats(func(*tree_map(other, args), **tree_map(other, kwargs)))

    def combine(self, call, out, weights: list[Twin]) -> None:
        """Parameters alone: their function has twins as well."""
        before = {name: self.again(call, weights, name) for twin in weights for name in twin.before}
        units = {name: max(twin.units.get(name, 0.0) for twin in weights) for name in before}
        if name_of(call) in ("mul", "rmul"):
            for name in units:
                units[name] *= math.prod(
                    root_mean_square(t.tensor) for t in weights if name not in t.before
                )
        for index, tensor in enumerate(floats(out)):
            self.twins[id(tensor)] = Twin(
                tensor, {name: each[index] for name, each in before.items()}, units
            )

    def meet(self, call, out, weights: list[Twin]) -> None:
        """Parameters meet data."""
        if not isinstance(out, torch.Tensor):
            return
        replaced = {id(twin.tensor) for twin in weights}
        data = [x for x in floats(call[1:]) if id(x) not in replaced]
        before, found, units = {}, {}, {}
        for twin in weights:
            for name, unit in twin.units.items():
                [before[name]] = self.again(call, weights, name)
                size = root_mean_square(last(out - before[name]))
                if data and size:
                    doubled = (
                        self.again(call, weights, None, 2.0)[0]
                        - self.again(call, weights, name, 2.0)[0]
                    )
                    degree = round(math.log2(max(root_mean_square(last(doubled)) / size, 1)))
                    unit *= root_mean_square(torch.cat([last(x).flatten() for x in data])) ** degree
                found[name] = {
                    "name": name,
                    "meets": name_of(call),
                    "unit": unit,
                    "size": size / unit,
                }
                units[name] = unit
        self.found.extend(found.values())
        self.twins[id(out)] = Twin(out, before, units, found)

    def follow(self, call, out, products: list[Twin]) -> None:
        """A contribution on its own way: what is noted of it is what arrives."""
        function = name_of(call)
        found = {name: note for twin in products for name, note in twin.found.items()}
        matrices = all(note["meets"] in MATRICES for note in found.values())
        normalises = function == "softmax" or (function in NORMS and matrices)
        if not (normalises or function in SUMS or function in MOVES):
            return
        before = {name: self.again(call, products, name)[0] for name in found}
        for name, note in found.items() if function not in MOVES else ():
            if normalises:
                note |= {"unit": 1.0, "meets": f"{note['meets']}, {function}"}
            elif function in ("mul", "rmul"):
                others = [twin.tensor for twin in products if name not in twin.before]
                note["unit"] *= math.prod(root_mean_square(last(each)) for each in others) or 1.0
            note["size"] = root_mean_square(last(out - before[name])) / note["unit"]
        self.twins[id(out)] = Twin(out, before, {}, found)


def floats(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def last(x):
    """The last token of what is (1, T, ...)."""
    return x[:, -1:] if x.ndim > 2 and x.shape[0] == 1 else x


def name_of(call) -> str:
    return getattr(call[0], "__name__", "").strip("_")


class Coordinates(Stream):
    """Every step by itself; `seen` gets h, c and, where the write has a direction, k of every site, x_in elsewhere."""

    def __init__(self):
        self.seen: list[dict[str, torch.Tensor]] = []

    def write(self, site, state, h, c, x_in, cache):
        self.seen.append({"h": h, "c": c})
        if hasattr(site.write, "compute_k_hat"):
            self.seen[-1]["k"] = site.write.compute_k_hat(state, h, x_in, c)
        else:
            self.seen[-1]["x_in"] = x_in[0] if isinstance(x_in, tuple) else x_in
        return super().write(site, state, h, c, x_in, cache)

    @classmethod
    @torch.no_grad()
    def of(cls, model, ids, targets) -> list[dict[str, torch.Tensor]]:
        stream = cls()
        with model.through(stream):
            return [{"logits": model(ids)[0].gather(2, targets.unsqueeze(2))}, *stream.seen]


def step(model, optimizers, rate: float, ids, targets) -> None:
    optimizer.apply_learning_rates(optimizers, {"lr": rate})
    (LOSS_SCALE * model(ids, targets)[1]).backward()
    for each in optimizers:
        each.step()
        each.zero_grad()


def made(stem: str, keys: dict, width: int, start: dict):
    shape = {
        "num_hidden_layers": 2,
        "num_attention_heads": width // 32,
        "head_dim": 32,
        "hidden_size": width,
    }
    shape |= {"vocab_size": VOCABULARY, "block_size": 8, "hidden_size_base": 64}
    start = {
        key: value
        for key, value in {**NARROW, **start}.items()
        if key in vars(model_class(stem).Config())
    }
    return build(stem, **shape, **start, **keys)


def trained(model, settings: dict) -> tuple:
    """(ids, targets, coordinates before) of the first steps of training."""
    optimizers = optimizer.build_optimizers(model, SimpleNamespace(**settings), torch.float32)
    text = some_text(2, 8)
    ids, targets = text[:, :-1], text[:, 1:]
    before = Coordinates.of(model, ids, targets)
    for _ in range(STEPS):
        step(model, optimizers, LEARNING_RATE, ids, targets)
    return ids, targets, before


def sizes(stem: str, keys: dict, name: str, width: int, seed: int) -> dict[str, float]:
    """Root mean squares of all changes and contributions in models of this width, trained by the optimizer `name`."""
    torch.manual_seed(seed)
    settings = {
        "optimizer": name,
        "learning_rate": 1.0,
        "weight_decay": 0.0,
        "mixing_decay": True,
        "beta1": 0.9,
        "beta2": 0.95,
    }
    squares: dict[str, list[float]] = {}
    model = made(stem, keys, width, LEVEL_START)
    ids, targets, before = trained(model, settings)
    for old, new in zip(before, Coordinates.of(model, ids, targets)):
        for what in new:
            squares.setdefault(f"change of {what}", []).append(
                root_mean_square(new[what] - old[what]) ** 2
            )
    if vars(model.config) != vars((plain := made(stem, keys, width, {})).config):
        model = plain
        trained(model, settings)
    model.double()
    for _ in range(PROBES):
        text = some_text(1, PROBE_TOKENS)
        for note in contributions(model, settings, text[:, :-1], text[:, 1:]):
            squares.setdefault(f"{kind_of(note['name'])}: {note['meets']}", []).append(
                note["size"] ** 2
            )
    met = {what.partition(":")[0] for what in squares}
    trained_kinds = {
        kind_of(name): None
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    squares |= {f"{kind}: meets no data": [0.0] for kind in trained_kinds if kind not in met}
    return {what: math.sqrt(sum(values) / len(values)) for what, values in squares.items()}


def kind_of(name: str) -> str:
    """What a parameter is noted under, of its full name: the same of every block."""
    return ".".join(name.split(".")[-2:])


def some_text(rows: int, length: int):
    """Something to learn: each token follows from the one before. int64 (rows, length + 1)."""
    return (torch.randint(0, VOCABULARY, (rows, 1)) + torch.arange(length + 1) * 5) % VOCABULARY


def contributions(model, settings: dict, ids, targets) -> list[dict]:
    """What a step of a new optimizer contributes, parameter by parameter; the step is undone."""
    before = {
        name: (parameter, parameter.detach().clone())
        for name, parameter in model.named_parameters()
    }
    optimizers = optimizer.build_optimizers(model, SimpleNamespace(**settings), torch.float32)
    targets = targets.clone()
    targets[:, :-1] = -1
    step(model, optimizers, PROBE_RATE, ids, targets)
    with torch.no_grad(), Contributions(before) as watched:
        model(ids)
    with torch.no_grad():
        for parameter, old in before.values():
            parameter.copy_(old)
    return watched.found


def slope(widths: list[int], values: list[float]) -> float:
    """Least-squares slope of log value over log width."""
    return float(np.polyfit(np.log(widths), np.log(values), 1)[0])


def check(stem: str, keys: dict, name: str, widths: list[int], seeds: int) -> dict[str, dict]:
    """{what: {"values": its size at each width, "slope"}}; values are geometric means over seeds."""
    models = [[sizes(stem, keys, name, width, seed) for seed in range(seeds)] for width in widths]
    result = {}
    for what in models[0][0]:
        logs = [np.log([max(each[what], SMALLEST) for each in of_width]) for of_width in models]
        values = [math.exp(each.mean()) for each in logs]
        result[what] = {"values": values, "slope": slope(widths, values)}
    return result


def bound(what: str) -> float:
    if what in VECTORS:
        return math.inf
    return SOFTMAX_BOUND if "softmax" in what else BOUND


def not_level(result: dict[str, dict]) -> dict[str, float]:
    """{what: slope} of what changes more or less in wide models than in narrow ones; nan: of what does not change."""
    slopes = {
        what: each["slope"] if min(each["values"]) > NOTHING else math.nan
        for what, each in result.items()
    }
    middle = {what: SOFTMAX if "softmax" in what else 0.0 for what in slopes}
    return {
        what: slope
        for what, slope in slopes.items()
        if not abs(slope - middle[what]) <= bound(what)
    }


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


def all_cases() -> list[str]:
    """Return every variant, followed by its other settings."""
    return [
        case
        for name in MODEL_NAMES
        for case in (name, *(other for other in OTHER_CASES if other.partition("+")[0] == name))
    ]


def stem_and_keys(case: str) -> tuple[str, dict]:
    """ "stem+key=value+..." as (stem, {key: value}). ValueError: there is no such stem, key or value."""
    stem, *options = case.split("+")
    if stem not in MODEL_NAMES:
        raise ValueError(
            f"--models={case}: give one of {', '.join(MODEL_NAMES)}, with +key=value for keys of the model"
        )
    knobs = collect_options(model_class(stem).Config)
    options = dict(option.partition("=")[::2] for option in options)
    configurator.check_names(options, knobs)
    keys = configurator.read_settings({}, options, knobs)
    model_class(stem).Config(**keys)
    return stem, keys


def markdown(rows: list[dict]) -> str:
    """Per model and optimizer the least and largest slope of changes and of contributions, and what is not level."""
    lines = []
    for row in rows:
        seen = {what: each["slope"] for what, each in row["changes"].items()}
        parts = [
            [slope for what, slope in seen.items() if what.startswith("change") == first]
            for first in (True, False)
        ]
        cells = [f"{min(part):+.2f} to {max(part):+.2f}" for part in parts]
        count = f"{len(not_level(row['changes']))} of {len(seen)}"
        lines.append(
            (row["model"], row["optimizer"], "muP" if row["mup"] else "plain", *cells, count)
        )
    return tables.format_markdown(
        ("model", "", "", "h, c, k, x_in, logits", "parameters", "not level"), lines
    )


def draw(rows: list[dict]):
    """Every slope as a point; a panel an optimizer, a line a model."""
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    looks = {"h, c, k, x_in, logits": ("D", 1), "contribution of a parameter": ("o", 0)}
    height = 0.6 + 0.16 * len(rows) / len(names)
    figure, axes = plots.make_panels(1, len(names), height, list(looks), sharey=True)
    entries = {}
    for panel, name in zip(axes[0], names):
        ours = [row for row in rows if row["optimizer"] == name]
        entries["counts as level"] = panel.axvspan(-BOUND, BOUND, color="0.9")
        for label, (marker, color) in looks.items():
            points = [
                (each["slope"], -place)
                for place, row in enumerate(ours)
                for what, each in row["changes"].items()
                if what.startswith("change") == (marker == "D")
            ]
            style = {"linestyle": "", "color": plots.COLORS[color], "alpha": 0.6}
            (entries[label],) = panel.plot(*zip(*points), marker, **style)
        labels = [row["model"] + ("" if row["mup"] else ", without muP") for row in ours]
        for common, short in (("-gpt-mha-rope", ""), ("-gpt-mha", ""), ("+ddl_", " "), ("+", " ")):
            labels = [label.replace(common, short) for label in labels]
        panel.set_yticks([-place for place in range(len(ours))], labels, fontsize=6)
        panel.set(title=name, xlabel="slope")
        panel.grid(visible=False, axis="y")
    plots.add_legend(figure, entries)
    return figure


FILE = "mup"


def add_options(parser) -> None:
    models = "stems, or stem+key=value, with commas between (default: all, and their forms)"
    parser.add_argument("--models", help=models)
    seeds = "models of each width (default: %(default)s)"
    parser.add_argument("--seeds", type=int, default=3, help=seeds)


def run(args) -> None:
    """Check what the file of figures lacks, storing each; then the table and the figure beside it."""
    plots.use_print_style()  # a missing package is known before the work
    cases = args.models.split(",") if args.models else all_cases()
    parsed = {case: stem_and_keys(case) for case in cases}
    code = compute_digest(
        *MODEL_FILES, "training/optimizer.py", "research/analysis/coordinates.py"
    )[:12]
    settings = {"widths": args.widths, "seeds": args.seeds}
    figures, rows = Figures(args.json, torch.device("cpu"), settings, resume=True, code=code), []
    for name in args.optimizers:
        for mup, case in [(True, case) for case in cases] + [
            (False, case) for case in cases if case in CONTRAST
        ]:
            key = {"model": case, "optimizer": name, "mup": mup}
            if (row := figures.find(**key)) is None:
                stem, keys = parsed[case]
                row = {
                    **key,
                    "changes": check(stem, {**keys, "mup": mup}, name, args.widths, args.seeds),
                }
                figures.add(row)
            print(
                f"{case}, {name}, {'muP' if mup else 'plain'}: not level: {not_level(row['changes'])}",
                flush=True,
            )
            rows.append(row)
    print(markdown(rows))
    out = args.json.with_suffix(".png")
    with plots.use_print_style():
        plots.save(draw(rows), out)
    print(f"wrote {args.json}, drew {out}")
