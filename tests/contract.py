"""The contract of a residual stream: checks of a model class, whose messages name what broke.

test_contract.py runs them for every variant of model/ and for the streams of tests/streams;
broken_streams.py has streams with a fault that a check must find.
"""

import contextlib
from collections.abc import Callable, Iterator

import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from model import cost, kernels
from model.block import Site, State, Stream
from model.cache import pad_left
from model.causality import find_leak, move_parameters
from model.gpt import GPT
from model.parameters import collect_rules
from training import optimizer
from training.config import TrainConfig
from training.residual_statistics import ObservedStream, compute_residual_statistics

TINY = {**models.TINY, "num_hidden_layers": 3}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def tiny(cls: type[GPT], **changes) -> GPT:
    """Build a tiny model in float64 with every parameter off its initial value.

    Otherwise ones, zeros and equal taps could hide an error.
    """
    torch.manual_seed(0)
    return move_parameters(cls(cls.Config(**{**TINY, **changes})).double())


def tokens(*shape: int) -> torch.Tensor:
    """Return ids of a shape, which are the same at every call."""
    return torch.randint(0, TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(2))


def loss_and_gradients(
    model: GPT, ids: torch.Tensor, forward: Callable | None = None
) -> list[torch.Tensor]:
    """Return the loss, and the gradient of every parameter that has one.

    forward: the compiled model, for example; by default the model itself
    """
    model.zero_grad()
    forward = model if forward is None else forward
    _, loss = forward(ids, ids.roll(-1, 1))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_rules(cls: type[GPT]) -> None:
    """Check that a parameter's rule fills all of it, and that one group of an optimizer has it."""
    with filled_with_nan():
        model = cls(cls.Config(**TINY))
    rules = collect_rules(model)
    registered = set(model.parameters())
    for site in sites_of(model):
        for part in vars(site).values():
            if isinstance(part, nn.Module):
                assert registered.issuperset(part.parameters()), (
                    f"{type(part).__name__} is used by a site, but it is not a submodule of its block"
                )
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), (
            f"the rule of {name} leaves numbers as they were in memory"
        )
    for kind in ("adamw", "muon"):
        optimizers = optimizer.build_optimizers(model, TrainConfig(optimizer=kind))
        groups = [
            (optimizer_part, group)
            for optimizer_part in optimizers
            for group in optimizer_part.param_groups
        ]
        names = sorted(name for _, group in groups for name in group["names"])
        trained = sorted(
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        )
        assert names == trained, f"{kind} has other parameters than the model"
        for optimizer_part, group in groups:
            for name in group["names"]:
                assert (group["weight_decay"] > 0) == rules[name].decay, (
                    f"{kind} decays {name} against its rule"
                )
                assert rules[name].muon or not isinstance(optimizer_part, torch.optim.Muon), (
                    f"Muon has {name} against its rule"
                )


@contextlib.contextmanager
def filled_with_nan() -> Iterator[None]:
    """Let new tensors hold NaN until they are written to."""
    fill_memory = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # train.py switches it off
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill_memory


def check_causality(cls: type[GPT]) -> None:
    """Check that no token sees later ones, and that each sees those before it."""
    model = tiny(cls).eval()
    ids = tokens(1, 9)
    leak = find_leak(model, ids)
    assert leak is None, f"a token sees later ones: {leak}"
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % TINY["vocab_size"]
    with torch.no_grad():
        difference = (model(ids)[0] - model(changed)[0]).abs().amax(-1)[0]
    assert difference[5:].min() > 1e-9, "a later token does not see an earlier one"


def check_cache(cls: type[GPT]) -> None:
    """Check logits of a sequence in parts, and of a batch of prompts of unequal lengths."""
    model = tiny(cls)
    ids = tokens(2, 9)
    uncached, _ = model(ids)
    for lengths in ((1,) * 9, (2, 1, 6)):
        cache = model.new_cache()
        logits = [model(part, cache=cache)[0] for part in ids.split(lengths, dim=1)]
        assert torch.allclose(torch.cat(logits, dim=1), uncached, **EXACT), (
            "with the cache it computes something else than without"
        )
    prompts = [ids[0, :2].tolist(), ids[1, :7].tolist()]
    cache = model.new_cache()
    prompt_logits, _ = model(pad_left(prompts), cache=cache)
    next_logits, _ = model(ids[:, -1:], cache=cache)
    for row, prompt in enumerate(prompts):
        alone, _ = model(torch.tensor([[*prompt, ids[row, -1]]]))
        batched = torch.stack([prompt_logits[row, -1], next_logits[row, -1]])
        assert torch.allclose(batched, alone[0, -2:], **EXACT), (
            "something is made of the zeros before a shorter prompt: zero must go to zero"
        )


def check_compiled(cls: type[GPT], backend: str = "aot_eager") -> None:
    """Check that the model compiles to one graph with the same loss and gradients."""
    model = tiny(cls, num_hidden_layers=2)
    ids = tokens(2, 8)
    eager = loss_and_gradients(model, ids)
    try:
        compiled = loss_and_gradients(
            model, ids, torch.compile(model, fullgraph=True, backend=backend)
        )
    except torch._dynamo.exc.Unsupported as error:
        raise AssertionError(
            f"torch.compile must break the graph: {str(error).partition(chr(10))[0]}"
        ) from error
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(
        compiled, eager, **EXACT, msg=lambda text: f"compiled it computes something else: {text}"
    )


def check_autocast(cls: type[GPT]) -> None:
    """Check bfloat16 logits, the dtype of the loss, and that a write keeps the state's dtypes."""
    model = tiny(cls).float()
    ids = tokens(2, 8)
    exact, _ = model(ids)
    stream = DtypeRecorder()
    with torch.autocast("cpu", torch.bfloat16), model.through(stream):
        logits, loss = model(ids, ids, return_logits=True)
    assert loss.dtype == torch.float32, f"under autocast the loss is {loss.dtype}"
    for site, old_dtypes, new_dtypes in stream.writes:
        num_tensors = min(len(old_dtypes), len(new_dtypes))  # a state may grow, or shrink
        assert old_dtypes[:num_tensors] == new_dtypes[:num_tensors], (
            f"under autocast the write of block {site.layer}, {site.name}, changes the state from "
            f"{old_dtypes} to {new_dtypes}"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    # HC, with weights as wild as these, magnifies any rounding: that of the weights alone as well.
    error = relative_error(logits, exact)
    rounding_error = relative_error(model(ids)[0], exact)
    assert error < (0.1 if rounding_error < 0.1 else 2 * rounding_error), (
        f"under autocast the logits are off by {error:.2g} of their size"
    )


class DtypeRecorder(Stream):
    """Run one operation at a time, and record the dtypes of the state around each write."""

    def __init__(self):
        self.writes: list[tuple[Site, tuple, tuple]] = []

    def write(self, site, state, h, x_in, c, cache):
        written = super().write(site, state, h, x_in, c, cache)
        self.writes.append((site, dtypes_of(state), dtypes_of(written)))
        return written


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference, divided by that of the exact result."""
    return ((result - exact).norm() / exact.norm()).item()


def dtypes_of(state: State) -> tuple[torch.dtype, ...]:
    """Return the dtype of each tensor of a state."""
    return tuple(tensor.dtype for tensor in tree_leaves(state))


def check_checkpointing(cls: type[GPT]) -> None:
    """Check that activation checkpointing changes neither loss nor gradients."""
    model = tiny(cls)
    ids = tokens(2, 8)
    stored = loss_and_gradients(model, ids)
    model.activation_checkpointing = True
    recomputed = loss_and_gradients(model, ids)
    torch.testing.assert_close(
        recomputed, stored, **EXACT, msg=lambda text: f"recomputed blocks differ: {text}"
    )


def check_costs(cls: type[GPT]) -> None:
    """Check that the cost can be counted, which a run does at its start, and what is not used."""
    counted = cost.count_cost(cls(cls.Config(**TINY)))
    assert counted.flops > 0
    assert not counted.unused_parameters, (
        f"the loss does not depend on {', '.join(counted.unused_parameters)}"
    )


def check_losses(cls: type[GPT]) -> None:
    """Check that the loss is the cross-entropy of the logits."""
    model = tiny(cls)
    ids = tokens(2, 8)
    targets = ids.roll(-1, 1)
    for mode in (model.train, model.eval):
        mode()
        logits, loss_with_logits = model(ids, targets, return_logits=True)
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for loss in (loss_with_logits, model(ids, targets)[1]):
            assert abs(loss - entropy) < 1e-9, (
                f"the loss is {loss:.6g}, the cross-entropy of its logits {entropy:.6g}"
            )


def check_statistics(cls: type[GPT]) -> None:
    """Check that a statistic is a finite number for each token, and changes no logits."""
    model = tiny(cls)
    ids = tokens(2, 8)
    logits, _ = model(ids)
    shapes = []

    def on_write(_site, write):
        shapes.extend(value.shape for value in write.statistics.values())

    with model.through(ObservedStream(on_write)):
        assert torch.equal(model(ids)[0], logits), "a statistic changes what the model computes"
    assert set(shapes) <= {ids.shape}, (
        f"a statistic is no number for each token: {set(shapes)}, not {ids.shape}"
    )
    statistics = compute_residual_statistics(model, ids, contextlib.nullcontext())
    assert all(torch.tensor(values).isfinite().all() for values in statistics.values()), (
        "a statistic is not finite"
    )
    assert {"attn.state_rms", "mlp.state_rms"} <= statistics.keys(), "sites are named attn and mlp"
    num_blocks = {len(values) for values in statistics.values()}
    assert num_blocks <= set(range(1, TINY["num_hidden_layers"] + 1)), (
        f"statistics of {num_blocks} blocks"
    )


def sites_of(model: GPT) -> list[Site]:
    """Return the sites of all blocks."""
    return [site for block in model.transformer.h for site in block.sites]


def check_fused(cls: type[GPT]) -> None:
    """Check the fused kernels against float64, or that they say why there are none."""
    pytest.importorskip("fused")  # its interpreter is faster
    model = tiny(cls, num_hidden_layers=2).float()
    reason = kernels.reason_not_fused(model)
    if reason is not None:
        with pytest.raises(ValueError, match="kernels=on: "):
            kernels.use(model, "on", "cpu")
        assert "no fused kernel" in reason, reason
        return
    ids = tokens(1, 3)
    exact = loss_and_gradients(tiny(cls, num_hidden_layers=2), ids)
    kernels.use(model, "on", "cpu")
    fused = loss_and_gradients(model, ids)
    names = ["loss", *(name for name, p in model.named_parameters() if p.grad is not None)]
    assert len(names) == len(exact), "the kernels leave out a parameter"
    writes = ", ".join(sorted({type(site.write).__name__ for site in sites_of(model)}))
    gradient_norm = torch.stack([gradient.norm() for gradient in exact[1:]]).norm()
    for name, fused_value, exact_value in zip(names, fused, exact):
        scale = exact_value.norm()
        if name != "loss":  # a gradient that nearly cancels is as exact as the others
            scale = max(scale, 1e-2 * gradient_norm)
        error = (fused_value - exact_value).norm() / scale
        assert error < 1e-4, (
            f"the fused form of {writes} computes something else: {name} by {error:.2g}"
        )


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}
