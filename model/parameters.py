"""What is done with each parameter, declared where it is made; whoever initialises, trains or
rounds them reads that.

A module that makes a parameter has `rules`, a dict of its names to `Rule`s; `linear` makes a layer
with its rules. `rules_of(model)` collects them and refuses a parameter that has none, or two.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn

from torch import nn


class Kind(NamedTuple):
    """Of a learning rate under muP: it goes with this power of hidden_size_base / hidden_size."""

    adam: float
    muon: float | None = None  # None: Muon takes hidden matrices only


# An entry of Adam's update is the rate, and d of them add up in a product with what they were
# learned from. Muon's has entries as large (match_rms_adamw), spread over all directions alike:
# they add up as sqrt(d).
HIDDEN = Kind(adam=1, muon=0.5)  # matrices d x O(d)
OUTPUT = Kind(adam=1)  # from d features to a fixed number
INPUT = Kind(adam=0.5)  # from a fixed number to d features, with the initialisation of hidden ones
FIXED = Kind(adam=0)  # embeddings, norms, biases, convolutions, and what does not grow with d


class Rule(NamedTuple):
    """start: fills the parameter in place.

    kind: of its learning rate. decay: whether weight decay falls on it. muon: whether Muon may take
    it. rounded: whether autocast rounds it at every use, so that generation may keep it so. rate:
    what its learning rate is multiplied by, at any width; muP's factor comes to it.
    """

    start: Callable[[nn.Parameter], object]
    kind: Kind = FIXED
    decay: bool = False
    muon: bool = False
    rounded: bool = False
    rate: float = 1.0


def normal(std: float):
    return partial(nn.init.normal_, std=std)


def by_shape(factor: float):
    """N(0, std) whose std follows from the parameter's own shape, so that its product neither grows
    nor shrinks what it is given: factor / sqrt(inputs) * min(1, sqrt(outputs / inputs)). Outputs
    are the first axis, inputs the others.

    The "spectral" start of the paper's current release.
    """

    def start(parameter):
        outputs, inputs = len(parameter), parameter[0].numel()
        std = factor / math.sqrt(inputs) * min(1, math.sqrt(outputs / inputs))
        return nn.init.normal_(parameter, std=std)

    return start


def constant(value: float):
    return partial(nn.init.constant_, val=value)


def linear(inputs: int, outputs: int, weight: Rule, bias: Rule | None = None) -> nn.Linear:
    """A linear layer whose parameters have these rules; no bias without a rule for it."""
    layer = nn.Linear(inputs, outputs, bias=bias is not None)
    layer.rules = {"weight": weight} | ({"bias": bias} if bias else {})
    return layer


def aliases(model: nn.Module) -> dict[str, str]:
    """{name: the first one} of what has several names: tied weights, blocks that occur twice."""
    named = [*model.named_parameters(remove_duplicate=False)]
    named += model.named_buffers(remove_duplicate=False)
    first: dict[int, str] = {}
    firsts = {name: first.setdefault(id(tensor), name) for name, tensor in named}
    return {name: other for name, other in firsts.items() if other != name}


def refuse_shared_memory(model: nn.Module) -> None:
    """ValueError: two parameters are one piece of memory, which would part on the way to a GPU."""
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if (other := seen.setdefault(parameter.untyped_storage()._cdata, name)) != name:
            fix = f"to tie them, assign {other} itself"
            raise ValueError(f"{name} is a copy of {other} in the same memory: {fix}")


def refuse_missing_rule(model: nn.Module, name: str) -> NoReturn:
    """Raise ValueError for a parameter without a rule; the message says how to give it one."""
    owner_name, _, last_name = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if isinstance(owner, nn.Linear):
        bias_rule = "" if owner.bias is None else ", bias=Rule(constant(0.0))"
        raise ValueError(
            f"{name} has no rule: make the layer with model.parameters.linear("
            f"{owner.in_features}, {owner.out_features}, "
            f"Rule(config.matrix_start(), kind=HIDDEN, decay=True){bias_rule}) in place of "
            "nn.Linear"
        )
    raise ValueError(
        f"{name} has no rule: give its {type(owner).__name__} an attribute "
        f"rules = {{{last_name!r}: Rule(...)}} (model/parameters.py)"
    )


def rules_of(model: nn.Module) -> dict[str, Rule]:
    """The rule of every parameter by name; tied ones count once, with the rule of the first.

    ValueError: a parameter without a rule, or with two, or a rule for none; the message names it
    and the fix.
    """
    rules: dict[str, Rule] = {}
    for prefix, module in model.named_modules():
        for name, rule in getattr(module, "rules", {}).items():
            full = f"{prefix}.{name}".removeprefix(".")
            if full in rules:
                places = f"{type(module).__name__} declares it, and a module around it"
                raise ValueError(f"{full} has two rules: {places}")
            rules[full] = rule
    names = [name for name, _ in model.named_parameters()]
    for name in aliases(model):
        rules.pop(name, None)
    for name in names:
        if name not in rules:
            refuse_missing_rule(model, name)
    if unknown := sorted(rules.keys() - set(names)):
        reason = f"which is no parameter of {type(model).__name__}"
        raise ValueError(f"there is a rule for {unknown[0]}, {reason}")
    return {name: rules[name] for name in names}


def refuse_unregistered(model: nn.Module, parts: list[nn.Module]) -> None:
    """ValueError: a part has a parameter that is none of the model's: nobody would train it."""
    known = set(map(id, model.parameters()))
    for part in parts:
        if not known.issuperset(map(id, part.parameters())):
            name = type(part).__name__
            fix = f"assign it, self.part = {name}(...)"
            raise ValueError(f"{name} is used by a site, but no part of its block: {fix}")
