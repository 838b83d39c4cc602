"""What every residual stream must keep: checks of a model class, each of which names what broke.

test_contract.py runs them for every stem of model/ and for the streams of tests/streams;
broken_streams.py has streams that each of them must catch.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from model import cost, kernels
from model.block import Stream, state_size
from model.causality import find_leak, move_parameters
from model.decoding import padded
from model.parameters import rules_of
from training import optimizer
from training.residual_statistics import ObservedStream, compute_residual_statistics

TINY = {
    "vocab_size": 29,
    "block_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 6,
}
TINY |= {"hidden_size": 10}
SETTINGS = {
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "mixing_decay": True,
    "beta1": 0.9,
    "beta2": 0.95,
}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def tiny(cls, **changes):
    torch.manual_seed(0)
    return move_parameters(cls(cls.Config(**{**TINY, **changes})).double())


def tokens(*shape: int):
    """ids int64, the same every time."""
    return torch.randint(0, TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(2))


def loss_and_gradients(model, ids, call=None) -> list[torch.Tensor]:
    """The loss, and the gradient of every parameter that takes part."""
    model.zero_grad()
    _, loss = (model if call is None else call)(ids, ids.roll(-1, 1))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_rules(cls) -> None:
    """Every parameter has one rule, which fills all of it, and is in one group of every
    optimizer.
    """
    with filled_with_nan():
        model = cls(cls.Config(**TINY))
    rules = rules_of(model)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), (
            f"the rule of {name} leaves numbers as they were in memory"
        )
    for kind in ("adamw", "muon"):
        optimizers = optimizer.build_optimizers(model, SimpleNamespace(optimizer=kind, **SETTINGS))
        groups = [(each, group) for each in optimizers for group in each.param_groups]
        names = sorted(name for _, group in groups for name in group["names"])
        trained = sorted(
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        )
        assert names == trained, f"{kind} has other parameters than the model"
        for each, group in groups:
            for name in group["names"]:
                assert (group["weight_decay"] > 0) == rules[name].decay, (
                    f"{kind} decays {name} against its rule"
                )
                assert rules[name].muon or not isinstance(each, torch.optim.Muon), (
                    f"Muon has {name} against its rule"
                )


@contextlib.contextmanager
def filled_with_nan():
    """Memory that nobody has written to is NaN inside."""
    fill_memory = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # train.py switches it off
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill_memory


def check_causality(cls) -> None:
    """No token sees later ones, and each sees those before it."""
    model = tiny(cls).eval()
    ids = tokens(1, 9)
    leak = find_leak(model, ids)
    assert leak is None, f"a token sees later ones: {leak}"
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % TINY["vocab_size"]
    with torch.no_grad():
        difference = (model(ids)[0] - model(changed)[0]).abs().amax(-1)[0]
    assert difference[5:].min() > 1e-9, "a later token does not see an earlier one"


def check_cache(cls) -> None:
    """In parts as in one pass; shorter prompts beside longer ones as by themselves."""
    model, ids = tiny(cls), tokens(2, 9)
    whole, _ = model(ids)
    for cuts in ((1,) * 9, (2, 1, 6)):
        cache = model.new_cache()
        parts = torch.cat([model(part, cache=cache)[0] for part in ids.split(cuts, dim=1)], dim=1)
        assert torch.allclose(parts, whole, **EXACT), (
            "with the cache it computes something else than without"
        )
    rows = [ids[0, :2].tolist(), ids[1, :7].tolist()]
    cache = model.new_cache()
    together = [
        model(padded(rows), cache=cache)[0][:, -1],
        model(ids[:, -1:], cache=cache)[0][:, -1],
    ]
    for row, prompt in enumerate(rows):
        alone, _ = model(torch.tensor([[*prompt, ids[row, -1]]]))
        found = torch.stack([together[0][row], together[1][row]])
        message = "something is made of the zeros before a shorter prompt: zero must go to zero"
        assert torch.allclose(found, alone[0, -2:], **EXACT), message


def check_compiled(cls, backend: str = "aot_eager") -> None:
    model, ids = tiny(cls, num_hidden_layers=2), tokens(2, 8)
    wanted = loss_and_gradients(model, ids)
    try:
        found = loss_and_gradients(
            model, ids, torch.compile(model, fullgraph=True, backend=backend)
        )
    except torch._dynamo.exc.Unsupported as error:
        raise AssertionError(
            f"torch.compile must break the graph: {str(error).partition(chr(10))[0]}"
        ) from error
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(
        found, wanted, **EXACT, msg=lambda text: f"compiled it computes something else: {text}"
    )


def check_autocast(cls) -> None:
    """In bfloat16 close to float32, the loss in float32, and states after every write of the dtypes
    before it.
    """
    model, ids, dtypes = tiny(cls).float(), tokens(2, 8), {}
    exact, _ = model(ids)
    with torch.autocast("cpu", torch.bfloat16), model.through(Dtypes(dtypes)):
        logits, loss = model(ids, ids, return_logits=True)
    assert loss.dtype == torch.float32, f"under autocast the loss is {loss.dtype}"
    for where, (before, after) in dtypes.items():
        both = min(len(before), len(after))  # a state may grow, or shrink
        assert before[:both] == after[:both], (
            f"under autocast {where} changes the state from {before} to {after}"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    # HC, with weights as wild as these, magnifies any rounding: that of the weights alone as well.
    error, rounded = off(logits, exact), off(model(ids)[0], exact)
    assert error < (0.1 if rounded < 0.1 else 2 * rounded), (
        f"under autocast the logits are off by {error:.2g} of their size"
    )


class Dtypes(Stream):
    """Every step by itself; `found` gets the dtypes of the state before and after each write."""

    def __init__(self, found: dict):
        self.found = found

    def write(self, site, state, h, c, x_in, cache):
        written, loss = super().write(site, state, h, c, x_in, cache)
        self.found[f"the write of block {site.layer}, {site.name},"] = kinds(state), kinds(written)
        return written, loss


def off(found, wanted) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def kinds(state) -> tuple:
    return tuple(part.dtype for part in tree_leaves(state))


def check_checkpointing(cls) -> None:
    model, ids = tiny(cls), tokens(2, 8)
    wanted = loss_and_gradients(model, ids)
    model.activation_checkpointing = True
    found = loss_and_gradients(model, ids)
    torch.testing.assert_close(
        found, wanted, **EXACT, msg=lambda text: f"blocks computed again differ: {text}"
    )


def check_costs(cls) -> None:
    """FLOPs are those that torch counts, with what the parts declare; state bytes those of the
    states in memory.
    """
    model, ids, states = cls(cls.Config(**TINY)), tokens(1, TINY["block_size"]), []
    hooks = [
        b.register_forward_hook(lambda _, __, output: states.append(output[0]))
        for b in model.transformer.h
    ]
    with FlopCounterMode(display=False, custom_mapping=cost.ATTENTION) as counter, torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    parts = [model.input_embed, model.readout]
    parts += [
        part
        for b in model.transformer.h
        for site in b.sites
        for part in (site.read, site.write, site.post_write)
    ]
    declared = sum(part.elementwise_flops() for part in parts if hasattr(part, "elementwise_flops"))
    flops = 3 * (counter.get_total_flops() // TINY["block_size"] + declared)
    assert model.flops_per_token() == flops, (
        f"flops_per_token() is {model.flops_per_token()}, {flops} were counted"
    )
    size = max(sum(part.nbytes for part in tree_leaves(state)) for state in states) // ids.numel()
    said = model.state_bytes_per_token(torch.float32)
    assert said == size == 4 * max(map(state_size, states)), (
        f"state_bytes_per_token() is {said}, the state has {size}"
    )


def check_losses(cls) -> None:
    """The loss is the cross-entropy, in training and evaluation; extra losses reach the gradient
    alone.
    """
    model, ids, extra = tiny(cls), tokens(2, 8), []
    targets = ids.roll(-1, 1)
    for mode in (model.train, model.eval):
        mode()
        logits, whole = model(ids, targets, return_logits=True)
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for loss in (whole, model(ids, targets)[1]):
            assert abs(loss - entropy) < 1e-9, (
                f"the loss is {loss:.6g}, the cross-entropy of its logits {entropy:.6g}"
            )
    found = loss_and_gradients(model, ids)
    model.zero_grad()
    with model.through(ObservedStream(lambda _, write: extra.append(write.extra_loss))):
        logits, _ = model(ids)
    parts = [loss for loss in extra if loss is not None]
    (F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + sum(parts)).backward()
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(
        found[1:], wanted, **EXACT, msg=lambda text: f"not the gradient of both losses: {text}"
    )


def check_statistics(cls) -> None:
    """Every write's statistics are a number for each token, and none of them changes what the model
    computes.
    """
    model, ids, shapes = tiny(cls), tokens(2, 8), []
    wanted = model(ids)[0]

    def on_write(_site, write):
        shapes.extend(value.shape for value in write.statistics.values())

    with model.through(ObservedStream(on_write)):
        assert torch.equal(model(ids)[0], wanted), "a statistic changes what the model computes"
    assert set(shapes) <= {ids.shape}, (
        f"a statistic is no number for each token: {set(shapes)}, not {ids.shape}"
    )
    found = compute_residual_statistics(model, ids, contextlib.nullcontext())
    lengths = {len(values) for values in found.values()}
    assert all(torch.tensor(values).isfinite().all() for values in found.values()), (
        "a statistic is not finite"
    )
    assert {"attn.state_rms", "mlp.state_rms"} <= found.keys(), "sites are named attn and mlp"
    assert lengths <= set(range(1, TINY["num_hidden_layers"] + 1)), (
        f"statistics of {lengths} blocks"
    )


def sites_of(model) -> list:
    return [site for block in model.transformer.h for site in block.sites]


def check_fused(cls) -> None:
    """Where the kernels say that they serve the stream, they compute it; else they say what they do
    not know.
    """
    pytest.importorskip("triton")
    model, ids = tiny(cls, num_hidden_layers=2).float(), tokens(1, 3)
    wanted = loss_and_gradients(tiny(cls, num_hidden_layers=2), ids)
    reason = kernels.choose_form(model).reason
    if reason is not None:
        with pytest.raises(ValueError, match="kernels=on: "):
            kernels.use(model, "on", "cpu")
        assert "no fused kernel" in reason, reason
        return
    kernels.use(model, "on", "cpu")
    found = loss_and_gradients(model, ids)
    names = ["loss", *(name for name, p in model.named_parameters() if p.grad is not None)]
    assert len(names) == len(wanted), "the kernels leave out a parameter"
    scale = torch.stack([gradient.norm() for gradient in wanted[1:]]).norm()
    for name, got, want in zip(names, found, wanted):
        error = (got - want).norm() / (
            want.norm() if name == "loss" else max(want.norm(), 1e-2 * scale)
        )
        parts = sorted(
            {type(site.write).__name__ for block in model.transformer.h for site in block.sites}
        )
        assert error < 1e-4, (
            f"the fused form of {', '.join(parts)} computes something else: {name} by {error:.2g}"
        )


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}
