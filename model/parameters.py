"""The rule of each parameter: how it is initialized and trained.

A module that creates parameters has a dict `rules` from their names to `Rule`s; `linear` creates a
layer together with its rules. `collect_rules(model)` collects them, and refuses a parameter that has
none.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn


class Kind(NamedTuple):
    """How a learning rate scales with width under muP.

    The fields are powers of hidden_size_base / hidden_size.
    """

    adam: float

    # None for parameters that Muon does not train
    muon: float | None = None


# Each entry of an Adam update is as large as the learning rate, and d of them add up in a product
# with the features that they were computed from. The entries of a Muon update are as large
# (match_rms_adamw), but spread over all directions alike, so that they add up as sqrt(d).
HIDDEN = Kind(adam=1, muon=0.5)  # matrices d x O(d)
OUTPUT = Kind(adam=1)  # matrices from d features to a fixed number
INPUT = Kind(adam=0.5)  # matrices from a fixed number to d features that start as hidden ones do
FIXED = Kind(adam=0)  # embeddings, norms, biases, convolutions, and whatever does not grow with d


class Rule(NamedTuple):
    """How a parameter is initialized and trained."""

    # initializes the parameter in place
    start: Callable[[nn.Parameter], object]

    # how its learning rate scales with width
    kind: Kind = FIXED

    # whether weight decay applies to it
    decay: bool = False

    # whether Muon trains it, if the run uses Muon
    muon: bool = False

    # factor on its learning rate, besides that of muP
    lr_scale: float = 1.0


def start_by_name(name: str, parameter: torch.Tensor, rule: Rule, seed: int) -> None:
    """Initialize a parameter in place; its values depend on (seed, name) and its shape alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    parameter_seed = int.from_bytes(digest[:8], "big") >> 1  # torch takes 63 bits
    # the caller's generator stays where it is
    with torch.random.fork_rng(devices=[]):
        if parameter.device.type == "cpu":
            # a hundred times as fast as torch.manual_seed, which seeds every kind of device
            torch.default_generator.manual_seed(parameter_seed)
        else:
            torch.manual_seed(parameter_seed)
        rule.start(parameter)


def normal(std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that draws a parameter from N(0, std)."""
    return partial(nn.init.normal_, std=std)


def by_shape(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that draws a parameter from a normal distribution scaled by its shape.

    The standard deviation is factor / sqrt(n_in) * min(1, sqrt(n_out / n_in)), where n_out is the
    first axis and n_in the product of the others, so that its product neither grows nor shrinks its
    input. This is the "spectral" initialization of the paper's current release.
    """

    def start(parameter: torch.Tensor) -> torch.Tensor:
        n_out = len(parameter)
        n_in = parameter[0].numel()
        std = factor / math.sqrt(n_in) * min(1, math.sqrt(n_out / n_in))
        return nn.init.normal_(parameter, std=std)

    return start


def constant(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that fills a parameter with the value."""
    return partial(nn.init.constant_, val=value)


def one_hot(parameter: torch.Tensor, index: int) -> None:
    """Set the number at `index` of the last axis to 1 and all others to 0."""
    nn.init.zeros_(parameter)[..., index] = 1.0


def linear(
    in_features: int, out_features: int, weight: Rule, bias: Rule | None = None
) -> nn.Linear:
    """Return a linear layer with these rules; without a rule for the bias, it has none."""
    layer = nn.Linear(in_features, out_features, bias=bias is not None)
    layer.rules = {"weight": weight}
    if bias is not None:
        layer.rules["bias"] = bias
    return layer


def find_aliases(model: nn.Module) -> dict[str, str]:
    """Return {name: first name} for each tensor that occurs under several names, e.g. tied weights."""
    named_tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first_names: dict[int, str] = {}
    aliases = {}
    for name, tensor in named_tensors:
        first_name = first_names.setdefault(id(tensor), name)
        if first_name != name:
            aliases[name] = first_name
    return aliases


def collect_rules(model: nn.Module) -> dict[str, Rule]:
    """Return the rule of each parameter by name; tied parameters have one, of the first name.

    Raises:
        ValueError: a parameter has no rule
    """
    rules: dict[str, Rule] = {}
    for module_name, module in model.named_modules():
        for name, rule in getattr(module, "rules", {}).items():
            rules[f"{module_name}.{name}".removeprefix(".")] = rule
    parameter_names = [name for name, _ in model.named_parameters()]
    for name in parameter_names:
        if name not in rules:
            owner = model.get_submodule(name.rpartition(".")[0])
            raise ValueError(
                f"{name} has no rule: add one to the dict `rules` of its {type(owner).__name__}, or "
                "make the layer with `linear` (model/parameters.py)"
            )
    return {name: rules[name] for name in parameter_names}
