"""Parameter groups, optimizers and the learning-rate schedule of the paper's recipe."""

import math

import torch
from torch import nn

from model.parameters import FIXED, rules_of
from model.weights import EMBEDDING
from training.distributed import placed_like

# What metrics.jsonl calls a rate of its own: the run key that gives its peak. All others have `lr`.
OWN_RATES = {"muon_lr": "muon_learning_rate", "embedding_lr": "embedding_learning_rate"}


def parameter_groups(
    model: nn.Module, weight_decay: float, with_muon: bool
) -> tuple[list[dict], list[dict]]:
    """(AdamW's groups, Muon's) of all trainable parameters, each in one, as their rules say.

    A group is {"params", "names", "rate", "lr_scale", "weight_decay", "decays"}. rate: which of
    the run's learning rates it has, by its name in metrics.jsonl. lr_scale: what that is multiplied
    by, the factor of the parameter's rule and, under muP, `mup_scale` to the power of its kind.
    """
    groups: dict = {}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, rule in rules_of(model).items():
        if name in parameters:
            muon = with_muon and rule.muon
            power = rule.kind.muon if muon else rule.kind.adam
            scale = rule.rate * model.config.mup_scale**power
            rate = "muon_lr" if muon else "embedding_lr" if name == EMBEDDING else "lr"
            decay = weight_decay if rule.decay else 0.0
            facts = {"rate": rate, "lr_scale": scale, "weight_decay": decay, "decays": rule.decay}
            group = groups.setdefault(tuple(facts.values()), {"params": [], "names": [], **facts})
            group["params"].append(parameters[name])
            group["names"].append(name)
    muon = [group for group in groups.values() if group["rate"] == "muon_lr"]
    return [group for group in groups.values() if group["rate"] != "muon_lr"], muon


def without_gradient(model: nn.Module) -> list[str]:
    """Names of the trainable parameters that the loss does not depend on.

    The model is on the CPU, its streams as they are without kernels.
    """
    ids = torch.zeros(1, min(8, model.config.block_size), dtype=torch.int64)
    model(ids, ids)[1].backward()
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names = [name for name, parameter in parameters if parameter.grad is None]
    model.zero_grad(set_to_none=True)
    return names


def lr_scales(model: nn.Module, with_muon: bool) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied by, without those where it is 1."""
    adam, muon = parameter_groups(model, 0.0, with_muon)
    scaled = [group for group in adam + muon if group["lr_scale"] != 1]
    return {name: group["lr_scale"] for group in scaled for name in group["names"]}


def lr_scales_before(model: nn.Module) -> dict[str, float]:
    """`lr_scales` of checkpoints from before these were saved."""
    # Every scaled matrix had the same then, with any optimizer.
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.ndim > 1}
    scale, rules = model.config.mup_scale, rules_of(model)
    return {name: scale for name in parameters if scale != 1 and rules[name].kind != FIXED}


class Muon(torch.optim.Muon):
    """torch's, with a choice of the type of its iteration; updates of the size of AdamW's."""

    # Without instructions for it a CPU takes ten times as long for bfloat16 as for float32.

    def __init__(self, groups: list[dict], lr: float, dtype: torch.dtype):
        super().__init__(groups, lr=lr, adjust_lr_fn="match_rms_adamw")
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not (state := self.state[weight]):
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(momentum, group["momentum"]).to(self.dtype)  # Nesterov's
                how = group["ns_coefficients"], group["ns_steps"], group["eps"]
                update = orthogonal(update, *how)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * (0.2 * math.sqrt(max(weight.shape))))


def orthogonal(matrix: torch.Tensor, coefficients, steps: int, eps: float) -> torch.Tensor:
    """Newton-Schulz steps of Muon: the matrix with all of its singular values near 1."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if x.shape == matrix.shape else x.T


def build_optimizers(model: nn.Module, config, muon_dtype=torch.bfloat16) -> list:
    """[AdamW over all], or [AdamW, Muon over what may take it], as config.optimizer says.

    muon_dtype: of Muon's iteration.
    """
    adam, muon = parameter_groups(model, config.weight_decay, config.optimizer == "muon")
    betas, lr = (config.beta1, config.beta2), config.learning_rate
    adamw = torch.optim.AdamW(adam, lr=lr, betas=betas, eps=1e-8, fused=True)
    return [adamw, Muon(muon, lr, muon_dtype)] if muon else [adamw]


def learning_rate_at(step: int, config, peak: float | None = None) -> float:
    """The rate of step `step`, counted from 0: linear warmup over warmup_steps, then the schedule.

    `cosine` falls from the peak to the floor. `wsd` (warmup, stable, decay) stays at the peak and
    falls linearly to the floor over the last `decay_steps_of` the run; with none of them it never
    falls. Warmup ends at the peak, and the last of max_steps has the floor. peak: learning_rate,
    unless given. Of any peak the floor is the same share, min_lr / learning_rate.
    """
    peak = config.learning_rate if peak is None else peak
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    floor = peak / 20
    if config.min_lr is not None:  # it is at most learning_rate, and 0 where that is 0
        floor = config.min_lr and config.min_lr * (peak / config.learning_rate)
    if config.schedule == "wsd":
        decay_steps = decay_steps_of(config)
        left = (config.max_steps - 1 - step) / decay_steps if decay_steps else 1.0
        return floor + (peak - floor) * min(left, 1.0)
    after_warmup = max(config.max_steps - config.warmup_steps, 1)
    progress = min((step + 1 - config.warmup_steps) / after_warmup, 1.0)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def decay_steps_of(config) -> int:
    """Steps of the fall of `wsd`: decay_steps, or a fifth of the run if warm-up leaves so many."""
    if config.decay_steps is not None:
        return config.decay_steps
    return min(config.max_steps // 5, max(config.max_steps - config.warmup_steps, 0))


def set_rates(optimizers: list[torch.optim.Optimizer], step: int, config) -> dict[str, float]:
    """Give all groups the learning rate, and the weight decay, of step `step`, counted from 0.

    Returns {"lr": that of learning_rate}, and beside it those that have a peak of their own.
    """
    rates = {"lr": learning_rate_at(step, config)}
    taken = {group["rate"] for each in optimizers for group in each.param_groups}
    for name, key in OWN_RATES.items():
        if name in taken and (peak := getattr(config, key)) is not None:
            rates[name] = learning_rate_at(step, config, peak)
    set_learning_rate(optimizers, **rates)
    if config.weight_decay_rate is not None:
        share = learning_rate_at(step, config, 1.0)
        set_decay(optimizers, config.weight_decay * config.weight_decay_rate * share)
    return rates


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float, **own: float) -> None:
    """Of every group: its own rate where it is given, else `lr`, times the group's factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = own.get(group["rate"], lr) * group["lr_scale"]


def set_decay(optimizers: list[torch.optim.Optimizer], amount: float) -> None:
    """Let the next step multiply every weight that decays by 1 - amount, whatever its group's rate.

    AdamW and Muon multiply by 1 - lr * weight_decay; a group whose rate is 0 stays as it is.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group["decays"]:
                group["weight_decay"] = amount / group["lr"] if group["lr"] else 0.0


def step_where(wanted: torch.Tensor, optimizers: list[torch.optim.Optimizer]) -> None:
    """A step of fused AdamW if `wanted`, a bool on its device, else nothing."""
    # The device decides by itself, and nobody waits for it: as torch.amp's scaler has it.
    for optimizer in optimizers:
        optimizer.found_inf = (~wanted).float()
        optimizer.step()
        del optimizer.found_inf


def forget_unstepped(optimizers: list[torch.optim.Optimizer]) -> None:
    """Drop the zeros that an unwanted first step has made for a parameter."""
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            if state["step"] == 0:
                del optimizer.state[parameter]


def named_state(optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Every optimizer tensor as `<parameter>:<state>`, whatever the grouping and the order."""
    named = {}
    for optimizer, name, parameter in owners(optimizers):
        named |= {f"{name}:{key}": value for key, value in optimizer.state[parameter].items()}
    return named


def owners(optimizers):
    """(optimizer, name, parameter) of every parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"]):
                yield optimizer, name, parameter


def load_named_state(
    optimizers: list[torch.optim.Optimizer], state: dict[str, torch.Tensor], without: list[str] = ()
) -> None:
    """Put `named_state` back; {}, of a run whose steps were all skipped, is that of new optimizers.

    without: names of the parameters that get no gradient, and so no state. ValueError: a tensor of
    another model or optimizer.
    """
    if not state:
        return
    left, fix = dict(state), "take another checkpoint"
    for optimizer, name, parameter in owners(optimizers):
        keys = [key for key in left if key.startswith(f"{name}:")]
        if not keys and name not in without:
            raise ValueError(f"the checkpoint's optimizer has no state for {name}: {fix}")
        if keys:
            values = {key.partition(":")[2]: left.pop(key) for key in keys}
            moments = {key: placed_like(value, parameter) for key, value in values.items()}
            optimizer.state[parameter].update(moments)
    if left:
        raise ValueError(
            f"the checkpoint's optimizer has state for {next(iter(left))}, this run's has not"
        )
