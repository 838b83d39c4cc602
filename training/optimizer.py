"""Parameter groups, optimizers and the learning-rate schedule of the paper's recipe."""

import math

import torch
from torch import nn

from model.parameters import FIXED, rules_of
from training.distributed import placed_like


def parameter_groups(model: nn.Module, weight_decay: float, with_muon: bool) -> tuple[list[dict], list[dict]]:
    """(AdamW's groups, Muon's) of all trainable parameters, each in exactly one, as their rules say.

    A group is {"params", "names", "lr_scale", "weight_decay"}; under muP lr_scale is `mup_scale` to the power of the
    parameter's kind.
    """
    groups: dict = {}
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, rule in rules_of(model).items():
        if name in parameters:
            muon = with_muon and rule.muon
            scale = model.config.mup_scale ** (rule.kind.muon if muon else rule.kind.adam)
            key = muon, scale, weight_decay if rule.decay else 0.0
            group = groups.setdefault(key, {"params": [], "names": [], "lr_scale": scale, "weight_decay": key[2]})
            group["params"].append(parameters[name])
            group["names"].append(name)
    adam, muon = ([group for key, group in groups.items() if key[0] == wanted] for wanted in (False, True))
    return adam, muon


def lr_scales(model: nn.Module, with_muon: bool) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied by, without those where it is 1."""
    adam, muon = parameter_groups(model, 0.0, with_muon)
    return {name: group["lr_scale"] for group in adam + muon for name in group["names"] if group["lr_scale"] != 1}


def lr_scales_before(model: nn.Module) -> dict[str, float]:
    """`lr_scales` of checkpoints from before these were saved: every scaled matrix had the same, with any optimizer."""
    parameters, scale = dict(model.named_parameters()), model.config.mup_scale
    scaled = [name for name, rule in rules_of(model).items() if rule.kind != FIXED and parameters[name].ndim > 1]
    return {name: scale for name in scaled if parameters[name].requires_grad and scale != 1}


def build_optimizers(model: nn.Module, config) -> list[torch.optim.Optimizer]:
    """AdamW over all, or Muon over what may take it and AdamW over the rest, for `config.optimizer`.

    Muon runs with `match_rms_adamw`, which gives its updates the size of AdamW's: one learning rate serves both.
    """
    adam, muon = parameter_groups(model, config.weight_decay, config.optimizer == "muon")
    betas = (config.beta1, config.beta2)
    optimizers = [torch.optim.AdamW(adam, lr=config.learning_rate, betas=betas, eps=1e-8, fused=True)]
    if muon:
        optimizers.append(torch.optim.Muon(muon, lr=config.learning_rate, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def learning_rate_at(step: int, config) -> float:
    """The learning rate of step `step`, counted from 0: linear warmup over warmup_steps, then the schedule.

    `cosine` falls from learning_rate to min_lr. `wsd` (warmup, stable, decay) stays at learning_rate and falls linearly
    to min_lr over the last decay_steps; with none of them it never falls. Warmup ends at learning_rate, and the last of
    max_steps has min_lr.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    floor = config.learning_rate / 20 if config.min_lr is None else config.min_lr
    if config.schedule == "wsd":
        left = (config.max_steps - 1 - step) / config.decay_steps if config.decay_steps else 1.0
        return floor + (config.learning_rate - floor) * min(left, 1.0)
    progress = min((step + 1 - config.warmup_steps) / max(config.max_steps - config.warmup_steps, 1), 1.0)
    return floor + (config.learning_rate - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizers: list[torch.optim.Optimizer], learning_rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]


def step_where(wanted: torch.Tensor, optimizers: list[torch.optim.Optimizer]) -> None:
    """A step of fused AdamW if `wanted`, a bool on its device, else nothing. It decides itself: nobody waits for it."""
    for optimizer in optimizers:
        optimizer.found_inf = (~wanted).float()  # as torch.amp tells an optimizer to leave everything as it is
        optimizer.step()
        del optimizer.found_inf


def forget_unstepped(optimizers: list[torch.optim.Optimizer]) -> None:
    """Drop the zeros that a step which was not wanted has made for parameters without a step before it."""
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            if state["step"] == 0:
                del optimizer.state[parameter]


def named_state(optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Every optimizer tensor as `<parameter>:<state>`, so that a checkpoint does not depend on grouping or order."""
    return {
        f"{name}:{key}": value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"])
        for key, value in optimizer.state[parameter].items()
    }


def load_named_state(optimizers: list[torch.optim.Optimizer], state: dict[str, torch.Tensor]) -> None:
    """Put `named_state` back; {}, of a run whose steps were all skipped, is that of new optimizers.

    ValueError: a tensor of another model or optimizer.
    """
    if not state:
        return
    left = dict(state)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"]):
                keys = [key for key in left if key.startswith(f"{name}:")]
                if not keys:
                    raise ValueError(f"the checkpoint's optimizer has no state for {name}: take another checkpoint")
                values = {key.partition(":")[2]: left.pop(key) for key in keys}
                optimizer.state[parameter].update({key: placed_like(value, parameter) for key, value in values.items()})
    if left:
        raise ValueError(f"the checkpoint's optimizer has state for {next(iter(left))}, this run's has not")
