"""Checks of the fused kernels, on a CPU (interpreted) and on a GPU (compiled).

The oracle is the operations of model/residual.py in float64, differentiated by autograd. Two of its
parts follow the kernels. The state is rounded where they would store it, and the gradient passes
straight through the rounding. Sigmoids are written so that their derivatives are accurate for large
logits, which 1 - sigmoid(40) in float64 is not.
"""

import copy
import math
import os
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from helpers import precision
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import kernels
from model.kernels import expand as expand_module
from model.kernels import rope as rope_module
from model.kernels.add_norm import AddNormOutput, add_norm
from model.kernels.residual_step import StepOutput, residual_step
from model.residual import delta_rewrite, read_columns

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# dtypes of the state
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "mixed": torch.float32,
}
# dtypes of sublayer outputs and of the context, which matrix products produce and consume
PRODUCTS = {**DTYPES, "mixed": torch.bfloat16}
DEVICE = "cpu" if INTERPRETED else "cuda"
K_EPS = 1e-5
NORM_EPS = 1e-5
SCALE = 4.0
CONSTANT = 1.5


def programs(monkeypatch, count: int) -> None:
    """Plan launches for `count` multiprocessors, which decides how programs share the tokens."""
    for name, module in list(sys.modules.items()):
        if name.startswith("model.kernels.") and hasattr(module, "count_processors"):
            monkeypatch.setattr(module, "count_processors", lambda device: count)


@dataclass(frozen=True)
class Step:
    """One call of residual_step: the shapes, options and inputs in which the calls differ."""

    d: int = 37
    v: int = 4
    K: int = 1
    B: int = 1
    T: int = 7
    dtype: str = "fp32"
    form: str = "sigmoid"
    value_input: str = "residual"
    erase: bool = True
    heads: str = "gate value"  # those computed in the kernel
    write: bool = True
    pending: int = 0  # writes since the state was stored
    store: bool = True
    with_x_in: bool = True
    repeated: bool = False  # a repeated embedding, with value channels at stride 0
    logits: float | None = None  # saturated: all gate and value logits are this or its negative
    h_scale: float = 1.0  # standard deviation of the direction k~
    zero_h: bool = False  # the direction of the second token is zero
    x_scale: float = 1.0  # standard deviation of the state

    # results that reach the loss
    used: str = "new_state context x_in next_gate_logit next_value_logit"

    def __str__(self):
        parts = [
            f"{name}={value}" for name, value in vars(self).items() if value != getattr(Step, name)
        ]
        return ",".join(parts).replace("=True", "").replace("erase=False", "write_only") or "plain"

    def inputs(self) -> dict:
        """Return tensors in the dtypes of a model, on DEVICE, by argument of residual_step."""
        generator = torch.Generator().manual_seed(1)
        dtype = DTYPES[self.dtype]
        product_dtype = PRODUCTS[self.dtype]
        B, T, v, d = self.B, self.T, self.v, self.d

        def normal(*shape, dtype=torch.float32, scale=1.0):
            return (scale * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)

        def logits(*shape):
            values = normal(*shape)
            return values if self.logits is None else self.logits * values.sign()

        stored_state = normal(B, T, v, d, dtype=dtype, scale=self.x_scale)
        if self.repeated:
            stored_state = stored_state[:, :, :1].contiguous().expand(B, T, v, d)
        inputs = {"stored_state": stored_state}
        inputs["directions"] = [normal(B, T, d, dtype=product_dtype) for _ in range(self.pending)]
        inputs["updates"] = [
            normal(B, T, v, scale=self.x_scale / math.sqrt(d)) for _ in range(self.pending)
        ]
        if self.write:
            inputs["direction"] = normal(B, T, d, dtype=product_dtype, scale=self.h_scale)
            if self.zero_h:
                inputs["direction"][:, 1] = 0
            inputs["gate_logit"] = logits(B, T)
            if self.form != "constant":
                inputs["value_logit"] = logits(B, T, v)
        inputs["read_weights"] = normal(self.K, v, d, scale=1 / math.sqrt(v * self.K))
        inputs["norm_weight"] = 1 + 0.3 * normal(d)
        if "gate" in self.heads:
            inputs["gate_weight"] = normal(d, scale=1 / math.sqrt(d))
            inputs["gate_bias"] = normal(1)
        if "value" in self.heads:
            inputs["value_weight"] = normal(v, d, scale=1 / math.sqrt(d))
            inputs["value_bias"] = normal(v)
        return inputs

    def results(self) -> list[str]:
        """Return the fields of StepOutput that the call asks for."""
        names = ["new_state", "context"]
        if self.with_x_in:
            names.append("x_in")
        if "gate" in self.heads:
            names.append("next_gate_logit")
        if "value" in self.heads:
            names.append("next_value_logit")
        return names


# arguments of residual_step that have gradients, besides the state
LEAVES = (
    "direction",
    "gate_logit",
    "value_logit",
    "read_weights",
    "norm_weight",
    "gate_weight",
    "gate_bias",
    "value_weight",
    "value_bias",
)


def arguments(case: Step, inputs: dict, state, carry=None) -> dict:
    """Return the arguments of residual_step, in the order of the operator's."""
    return {
        "state": state,
        "stored_state": inputs["stored_state"],
        "directions": inputs["directions"],
        "updates": inputs["updates"],
        **{name: inputs.get(name) for name in LEAVES},
        "k_eps": K_EPS,
        "norm_eps": NORM_EPS,
        "value_form": case.form,
        "value_scale": SCALE,
        "value_constant": CONSTANT,
        "value_input": case.value_input,
        "erase": case.erase,
        "store_state": case.store,
        "return_x_in": case.with_x_in,
        "carry": carry,
        "context_dtype": PRODUCTS[case.dtype],
    }


def call_step(**arguments) -> StepOutput:
    return StepOutput(*residual_step(**arguments))


def place(case: Step, inputs: dict) -> torch.Tensor:
    """Return the argument `state`, which takes the gradient and whose values must not be read."""
    stored_state = inputs["stored_state"]
    state = torch.full(stored_state.shape, math.nan, dtype=stored_state.dtype, device=DEVICE)
    return state.requires_grad_()


def rounded(x, dtype):
    """Return x in float64, rounded as the kernels store it; the gradient passes straight through.

    Triton's interpreter truncates to bfloat16 where a GPU rounds to nearest. It rounds to float16.
    """
    if dtype == torch.bfloat16 and INTERPRETED:
        bits = x.detach().float().view(torch.int32) & -65536
        value = bits.view(torch.float32).double()
    else:
        value = x.detach().to(dtype).double()
    return x + (value - x.detach())


def sigmoid(x):
    """Return sigmoid(x) with a derivative that is accurate at both ends."""
    return F.logsigmoid(x).exp()


def oracle(case: Step, inputs: dict) -> tuple[dict, dict]:
    """Return the results of a step, and its leaves, in float64."""
    dtype = inputs["stored_state"].dtype
    state = inputs["stored_state"].double()
    for direction, u in zip(inputs["directions"], inputs["updates"]):
        update = u.double().unsqueeze(-1) * direction.double().unsqueeze(2)
        state = rounded(state + update, dtype)
    leaves = {name: inputs[name].double().requires_grad_() for name in LEAVES if name in inputs}
    leaves["state"] = state.detach().requires_grad_()
    state = leaves["state"]
    if case.write:
        if case.form == "constant":
            value = state.new_full(state.shape[:3], CONSTANT)
        elif case.form == "raw":
            value = leaves["value_logit"]
        else:
            value = SCALE * sigmoid(leaves["value_logit"])
        khat = F.rms_norm(leaves["direction"], (case.d,), eps=K_EPS**2 / case.d)
        beta = 2 * sigmoid(leaves["gate_logit"]).unsqueeze(-1)
        state = rounded(delta_rewrite(state, khat, beta, value, case.erase), dtype)
    x_in = read_columns(state, leaves["read_weights"])
    context = F.rms_norm(x_in, (case.d,), eps=NORM_EPS) * leaves["norm_weight"]
    results = {"new_state": state, "context": context, "x_in": x_in}
    if "gate" in case.heads:
        results["next_gate_logit"] = context @ leaves["gate_weight"] + leaves["gate_bias"]
    if "value" in case.heads:
        head_input = x_in if case.value_input == "residual" else context
        results["next_value_logit"] = head_input @ leaves["value_weight"].T + leaves["value_bias"]
    return {name: results[name] for name in case.results()}, leaves


def fused(case: Step, inputs: dict) -> tuple[dict, dict]:
    """Return the results of a step, and its leaves, by the kernels."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES if name in inputs}
    leaves["state"] = place(case, inputs)
    output = call_step(**arguments(case, {**inputs, **leaves}, leaves["state"]))
    return {name: getattr(output, name) for name in case.results()}, leaves


def cotangents(case: Step) -> dict:
    """Return a gradient for every result that reaches the loss."""
    generator = torch.Generator().manual_seed(2)
    B, T, v, d = case.B, case.T, case.v, case.d
    dtype = DTYPES[case.dtype]
    # all of them are drawn, so that those of a result do not depend on which others there are
    shapes_and_dtypes = {
        "new_state": ((B, T, v, d), dtype),
        "context": ((B, T, d), PRODUCTS[case.dtype]),
        "x_in": ((B, T, d), dtype),
        "next_gate_logit": ((B, T), torch.float32),
        "next_value_logit": ((B, T, v), torch.float32),
    }
    gradients = {
        name: torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)
        for name, (shape, dtype) in shapes_and_dtypes.items()
    }
    return {name: gradients[name] for name in case.results() if name in case.used.split()}


def run(case: Step, implementation=fused) -> tuple[dict, dict]:
    """Return the results and gradients of `fused` or `oracle`."""
    results, leaves = implementation(case, case.inputs())
    loss = sum(
        (results[name] * weight.to(results[name].dtype)).sum()
        for name, weight in cotangents(case).items()
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: x.detach() for name, x in results.items()}, dict(zip(leaves, gradients))


def check_close(name: str, got, expected, tolerance: float, scale: float | None = None) -> None:
    """Assert |got - expected| <= tolerance * scale in the norm of the entire tensor.

    scale: the norm of `expected` by default
    """
    assert got.shape == expected.shape, name
    assert got.isfinite().all(), name
    error = (got.double() - expected.double()).norm().item()
    if scale is None:
        scale = expected.double().norm().item()
    assert error <= tolerance * scale, (
        f"{name}: error {error:.3g} of {scale:.3g}, {error / (scale or 1):.2g}"
    )


def tolerance_of(case: Step, tensor) -> float:
    if case.dtype in ("fp32", "mixed"):
        return 1e-5 if tensor.dtype == torch.float32 else 1e-2
    # A read over several tokens is kept for the backward pass, in the state's dtype.
    return 1e-3 if tensor.dtype == torch.float32 and case.K == 1 else 1e-2


def check_step(case: Step) -> None:
    """Compare results and all gradients of a step with the oracle."""
    results, gradients = run(case)
    expected_results, expected_gradients = run(case, oracle)
    if not case.store:
        assert results.pop("new_state").stride() == (0, 0, 0, 0)  # no memory
    for name, got in results.items():
        check_close(name, got, expected_results[name], tolerance_of(case, got))
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        got = gradients[name]
        if expected is None:
            assert got is None or not got.any(), name
            continue
        tolerance = tolerance_of(case, got)
        scale = gradient_scale(case, name, expected_gradients)
        check_close(f"gradient of {name}", got, expected, tolerance, scale)
        # beta and its slope at both ends of a saturated sigmoid
        if name in ("gate_logit", "value_logit") and case.logits:
            torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=0)
        # every token, also those whose gradients are small
        if name in ("state", "direction"):
            for t, (row, expected_row) in enumerate(zip(got.flatten(0, 1), expected.flatten(0, 1))):
                check_close(f"gradient of {name}, token {t}", row, expected_row, 10 * tolerance)


def gradient_scale(case: Step, name: str, expected_gradients: dict) -> float | None:
    """Return what the error of a gradient is relative to; None for the gradient itself."""
    # the gradient of a bias is a sum whose terms cancel, and is as exact as they are
    if name.endswith("_bias"):
        result = f"next_{name}".replace("bias", "logit")
        return cotangents(case)[result].double().abs().sum().item()
    # the gate's is a sum over value channels of what the value's are made of, and cancels too
    if name == "gate_logit" and "value_logit" in expected_gradients and not case.logits:
        value_norm = expected_gradients["value_logit"].norm().item()
        return max(expected_gradients[name].norm().item(), 0.1 * value_norm)
    return None


def check_generation(case: Step, cuts: tuple[int, ...]) -> None:
    """Compare calls of some tokens each, with a carry from call to call, with all tokens at once."""
    inputs = case.inputs()
    carry = torch.zeros(case.B, case.K - 1, case.d, device=DEVICE)
    token_inputs = ("stored_state", "direction", "gate_logit", "value_logit")
    outputs = []
    for tensors in zip(*(inputs[name].split(cuts, dim=1) for name in token_inputs)):
        part = {**inputs, **{name: x.contiguous() for name, x in zip(token_inputs, tensors)}}
        output = call_step(**arguments(case, part, part["stored_state"], carry))
        carry = output.new_carry
        outputs.append(output)
    expected, _ = oracle(case, inputs)
    for name in ("new_state", "context", "x_in", "next_gate_logit", "next_value_logit"):
        parts = [getattr(output, name) for output in outputs]
        check_close(name, torch.cat(parts, dim=1), expected[name], tolerance_of(case, parts[0]))


def check_add_norm(
    d: int, B: int, T: int, dtype: str, add: bool, used: str = "state context"
) -> None:
    """Compare the results and gradients of add_norm with float64.

    used: the results that reach the loss
    """
    generator = torch.Generator().manual_seed(1)
    state_dtype = DTYPES[dtype]
    product_dtype = PRODUCTS[dtype]

    def normal(dtype):
        return torch.randn(B, T, d, generator=generator).to(dtype).to(DEVICE)

    leaves = [normal(state_dtype), normal(product_dtype)]
    # a gradient with the digits of the context is exact in both dtypes
    weights = [normal(product_dtype), normal(product_dtype)]
    leaves.append(1 + 0.3 * torch.randn(d, generator=generator).to(DEVICE))
    if not add:
        del leaves[1]
    for leaf in leaves:
        leaf.requires_grad_()
    output = AddNormOutput(
        *add_norm(
            x=leaves[0],
            h=leaves[1] if add else None,
            norm_weight=leaves[-1],
            eps=NORM_EPS,
            context_dtype=product_dtype,
        )
    )
    got = {"state": output.new_x, "context": output.context}
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    state = rounded(exact[0] + exact[1], state_dtype) if add else exact[0]
    expected = {"state": state, "context": F.rms_norm(state, (d,), eps=NORM_EPS) * exact[-1]}
    # without an addition the state is not a result
    names = [name for name in expected if name in used.split() and (add or name != "state")]
    for name in names:
        check_close(name, got[name], expected[name], tolerance_by_dtype(got[name]))

    def gradients(results: dict, leaves: list) -> tuple:
        loss = sum(
            (results[name] * weight.to(results[name].dtype)).sum()
            for name, weight in zip(names, weights)
        )
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    for i, (gradient, expected_gradient) in enumerate(
        zip(gradients(got, leaves), gradients(expected, exact))
    ):
        if expected_gradient is None:  # the norm's weight, where only the state is used
            assert gradient is None or not gradient.any()
        else:
            check_close(f"gradient {i}", gradient, expected_gradient, tolerance_by_dtype(gradient))


def tolerance_by_dtype(tensor) -> float:
    return 1e-5 if tensor.dtype == torch.float32 else 1e-2


def check_expand(d: int, v: int, K: int, B: int, T: int, dtype: str) -> None:
    """Compare the result and gradients of expand with float64."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, d, generator=generator).to(DTYPES[dtype]).to(DEVICE).requires_grad_()
    taps = torch.randn(K, v, d, generator=generator).to(DEVICE).requires_grad_()
    weight = torch.randn(B, T, v, d, generator=generator).to(DTYPES[dtype]).to(DEVICE)
    state = expand_module.expand(x, taps)
    gradients = torch.autograd.grad((state * weight).sum(), (x, taps))
    exact_x, exact_taps = (leaf.detach().double().requires_grad_() for leaf in (x, taps))
    padded = F.pad(exact_x, (0, 0, K - 1, 0))
    delayed = torch.stack([padded[:, K - 1 - s : K - 1 - s + T] for s in range(K)])
    expected_state = torch.einsum("sbti,sji->btji", delayed, exact_taps)
    expected_gradients = torch.autograd.grad(
        (expected_state * weight.double()).sum(), (exact_x, exact_taps)
    )
    check_close("state", state, expected_state, tolerance_by_dtype(state))
    for name, got, expected in zip(("x", "taps"), gradients, expected_gradients):
        check_close(f"gradient of {name}", got, expected, tolerance_by_dtype(got))


def heads_inputs(B: int, T: int, H: int, D: int, dtype: str, own_positions: bool):
    """qkv (B, T, 3, H, D), angles ([B,] T, D / 2) in float64, both norms, and a gradient of each
    result.
    """
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(B, T, 3, H, D, generator=generator).to(DTYPES[dtype]).to(DEVICE)
    qkv[0, 0, 0, 0] *= 1e-3  # where eps counts
    positions = torch.arange(T) + (5 * torch.arange(B)[:, None] if own_positions else 0)
    angle = positions.double()[..., None] * 10000.0 ** (-torch.arange(0, D, 2).double() / D)
    norms = [1 + 0.3 * torch.randn(D, generator=generator).to(DEVICE) for _ in range(2)]
    # As attention leaves them: (B, H, T, D), seen from (B, T, H, D).
    weights = [
        torch.randn(B, H, T, D, generator=generator).transpose(1, 2).to(DEVICE) for _ in range(3)
    ]
    return qkv, angle.to(DEVICE), norms, weights


def turned(x, angle, norm):
    """x (B, T, H, D) as complex numbers, turned by angle; then its RMSNorm."""
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(
        torch.ones_like(angle), angle
    ).unsqueeze(-2)
    y = torch.cat((pairs.real, pairs.imag), dim=-1)
    return y / (y.square().mean(-1, keepdim=True) + NORM_EPS).sqrt() * norm


def heads(qkv, angle, norms, weights) -> list:
    """Queries, keys, values and the gradients of qkv and the norms, by the kernels."""
    leaves = [leaf.clone().requires_grad_() for leaf in (qkv, *norms)]
    tables = angle.cos().float(), angle.sin().float()
    results = rope_module.RotatedHeads.apply(leaves[0], *tables, *leaves[1:], NORM_EPS)
    loss = sum((r * w.to(r.dtype)).sum() for r, w in zip(results, weights))
    return [*(r.detach() for r in results), *torch.autograd.grad(loss, leaves)]


def check_heads(B: int, T: int, H: int, D: int, dtype: str, own_positions: bool = False) -> None:
    inputs = heads_inputs(B, T, H, D, dtype, own_positions)
    qkv, angle, norms, weights = inputs
    exact = [leaf.double().requires_grad_() for leaf in (qkv, *norms)]
    wanted = [turned(exact[0][:, :, i], angle, exact[1 + i]) for i in range(2)] + [
        exact[0][:, :, 2]
    ]
    expected = torch.autograd.grad(
        sum((r * w.to(qkv.dtype).double()).sum() for r, w in zip(wanted, weights)), exact
    )
    names = (
        "queries",
        "keys",
        "values",
        "gradient of qkv",
        "of the queries' norm",
        "of the keys' norm",
    )
    for name, got, want in zip(names, heads(*inputs), (*wanted, *expected)):
        check_close(name, got, want, 1e-5 if dtype == "fp32" else 1e-2)


def fuse(model, interval: int = 2):
    """A copy of the model whose stream is fused, on DEVICE."""
    model = copy.deepcopy(model).to(DEVICE)
    assert kernels.use(model, "on", DEVICE, interval) is None
    return model


def tokens_of(model, B: int = 2, T: int = 5):
    """(ids, targets), one of which does not count."""
    ids, targets = torch.randint(
        0, model.config.vocab_size, (2, B, T), generator=torch.Generator().manual_seed(3)
    )
    targets[0, 1] = -1
    device = model.lm_head.weight.device
    return ids.to(device), targets.to(device)


def outcome(model, ids, targets, autocast: torch.dtype | None = None) -> dict:
    """Logits, loss and the gradient of every parameter, by name; None: takes no part."""
    model.zero_grad()
    # Attention by plain operations: the same bits every time.
    with sdpa_kernel(SDPBackend.MATH):
        with torch.autocast(ids.device.type, autocast, enabled=autocast is not None):
            logits, loss = model(ids, targets, return_logits=True)
        loss.backward()
    found = {"logits": logits.detach(), "loss": loss.detach()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return found | {name: g if g is None else g.detach().clone() for name, g in gradients.items()}


def check_model(model, interval: int = 2, T: int = 5) -> None:
    """Logits, loss and every parameter's gradient against the plain model in float64; compiled,
    first at the setting of training, against the plain model at the same.
    """
    got, exact = fuse(model, interval), copy.deepcopy(model).double()
    ids, targets = tokens_of(model, T=T)
    if not INTERPRETED:
        plain = outcome(copy.deepcopy(model).to(DEVICE), ids.to(DEVICE), targets.to(DEVICE))
        found = outcome(got, ids.to(DEVICE), targets.to(DEVICE))
        for name, want in plain.items():
            # With TF32 emulated, four seeds: up to 2.3e-5 of logits and loss, 5.5e-4 of a gradient;
            # from float64 both models are 2.7e-3 and 7e-2 away.
            if want is not None:
                check_close(name, found[name], want, *within(name, plain, model, 3e-4, 5e-3))
    with precision("highest"):
        found = outcome(got, ids.to(DEVICE), targets.to(DEVICE))
    wanted = outcome(exact, ids, targets)
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        if want is None:
            assert found[name] is None, name
            continue
        # The plain model in float32 is as far off: 1e-6 to 1.4e-5 over four seeds, whole models
        # being less well conditioned than one step.
        check_close(name, found[name].cpu(), want, *within(name, wanted, exact, 1e-5, 1e-4))


def within(name: str, wanted: dict, model, results: float, gradients: float) -> tuple[float, float]:
    """(tolerance, scale) of what `outcome` gives by this name: one of the results, or a parameter's
    gradient.
    """
    scale = wanted[name].norm().item()
    # Sums whose terms may cancel are as exact as the terms, whose size another gradient shows.
    if name.endswith(".bias"):
        weight = wanted[name.removesuffix("bias") + "weight"]
        scale = max(scale, weight.norm().item() / math.sqrt(weight.shape[-1]))
    elif name.endswith(".read"):
        taps = name.removesuffix("read") + "shortconv.weight"
        taps = taps if taps in wanted else name.removesuffix("read") + "weight"  # a pair's
        terms = wanted[taps].cpu() * model.get_parameter(taps).cpu()
        scale = max(scale, (terms.abs().sum() / model.get_parameter(name).norm()).item())
    return results if name in ("logits", "loss") else gradients, scale


def check_intervals(
    model, autocast: torch.dtype | None = None, intervals=(1, 2, 4), T: int = 5
) -> None:
    """How often the state is stored changes no bit."""
    runs = []
    for interval in intervals:
        run = fuse(model, interval)
        runs.append(outcome(run, *tokens_of(run, T=T), autocast))
    for other in runs[1:]:
        for name, want in runs[0].items():
            assert (want is None and other[name] is None) or torch.equal(other[name], want), name


@torch.no_grad()
def check_cached(model, cuts: tuple[int, ...]) -> None:
    """Some tokens at a time, with a cache, against the plain model in float64 on all at once."""
    got, (ids, _) = fuse(model), tokens_of(model, T=sum(cuts))
    want, _ = copy.deepcopy(model).double()(ids)
    # With TF32 emulated: up to 5.3e-3 over twelve seeds.
    for setting, tolerance in (("highest", 1e-5), *[("high", 2e-2)] * (not INTERPRETED)):
        with precision(setting):
            cache = got.new_cache()
            parts = [got(part.to(DEVICE), cache=cache)[0] for part in ids.split(cuts, dim=1)]
        check_close("logits", torch.cat(parts, dim=1).cpu(), want, tolerance)


def check_compiled(model, backend: str, tolerance: float, **options) -> None:
    """Without graph breaks, and as without the compiler."""
    eager, other = fuse(model), fuse(model)
    ids, targets = tokens_of(eager)
    wanted, found = outcome(eager, ids, targets), {}
    _, loss = torch.compile(other, fullgraph=True, backend=backend, **options)(ids, targets)
    loss.backward()
    found = {"loss": loss.detach()} | {name: p.grad for name, p in other.named_parameters()}
    whole = (
        torch.stack([p.grad.norm() for p in other.parameters() if p.grad is not None]).norm().item()
    )
    for name, got in found.items():
        if wanted[name] is None:
            assert got is None, name
        else:
            # A bias is a sum whose terms cancel: it is measured by the model's gradient, of which
            # it is a small part.
            check_close(
                name, got, wanted[name], tolerance, max(wanted[name].norm().item(), 1e-2 * whole)
            )


def check_checkpointing(model) -> None:
    """Blocks that are computed again give the same bits."""
    plain, other = fuse(model, 4), fuse(model, 4)
    other.activation_checkpointing = True
    ids, targets = tokens_of(plain)
    wanted, found = outcome(plain, ids, targets), outcome(other, ids, targets)
    assert all(want is None or torch.equal(found[name], want) for name, want in wanted.items())


def flat(found: dict):
    """The gradient of all parameters in one vector."""
    return torch.cat(
        [g.flatten().double().cpu() for n, g in found.items() if g is not None and n != "loss"]
    )


def check_autocast(model, dtype: torch.dtype, T: int = 5) -> None:
    """No further from float64 than the plain model is in this dtype, but for what the interpreter
    cuts off.
    """
    got, plain, exact = fuse(model), copy.deepcopy(model).to(DEVICE), copy.deepcopy(model).double()
    ids, targets = tokens_of(model, T=T)
    wanted = flat(outcome(exact, ids, targets))
    errors = []
    for run in (got, plain):
        found = outcome(run, ids.to(DEVICE), targets.to(DEVICE), dtype)
        errors.append(((flat(found) - wanted).norm() / wanted.norm()).item())
    assert errors[0] < (3 if INTERPRETED else 1.3) * errors[1] + 1e-3, errors
    assert errors[0] < 0.1, errors
