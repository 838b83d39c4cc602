"""Models whose parameters are bfloat16 or float16: what autocast computes, as near to float32 as it
comes.
"""

import copy

import pytest
import torch
from models import INPUTS, PAPER, TINY

from model import build
from training.residual_statistics import ObservedStream

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
BRANCHES = {"plain": {}, "vmap": {"ddl_map": "v"}, "gate": {"ddl_beta_single_linear": False}}
BRANCHES |= {"columns": {"ddl_map": "v", "ddl_k_branch": "attention"}}
CASES = [
    (stem, branch)
    for stem in PAPER
    for branch in BRANCHES
    if branch == "plain" or stem.startswith("DDL")
]
BRANCHES |= INPUTS
CASES += [("DDL-gpt-mha-rope-CC", branch) for branch in INPUTS]
CASES.remove(("DDL-vdim1-gpt-mha-rope", "columns"))


def lowered(stem: str, branch: str, dtype: torch.dtype):
    """(a model in dtype, the same in float32): the weights are equal, for they are rounded in
    both.
    """
    low = build(stem, **{**TINY, "hidden_size": 32, "head_dim": 16}, **BRANCHES[branch])
    with torch.no_grad():
        for parameter in low.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    low.to(dtype)
    return low, copy.deepcopy(low).float()


def passed(model, ids, targets):
    """(logits, loss, all gradients as one vector) of a pass; the loss in chunks is the other one,
    of `targets`.
    """
    logits, loss = model(ids, targets, return_logits=True)
    loss.backward()
    gradient = torch.cat(
        [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    )
    assert torch.equal(model(ids, targets)[1], loss)
    return logits.detach(), loss.detach(), gradient


def relative(found, wanted) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("stem", "branch"), CASES)
def test_forward_and_backward_are_near_float32(stem, branch, name):
    """One unit of rounding is 2^-8 (bfloat16) or 2^-11 (float16); measured are 3 of them, 6 for
    gradients.
    """
    dtype = DTYPES[name]
    low, exact = lowered(stem, branch, dtype)
    ids, targets = torch.randint(0, 29, (2, 3, 12))
    found, wanted = passed(low, ids, targets), passed(exact, ids, targets)
    assert (found[0].dtype, found[1].dtype) == (torch.float32, torch.float32)
    unit = torch.finfo(dtype).eps / 2
    for each, other, units in zip(found, wanted, (8, 4, 16)):
        assert relative(each, other) < units * unit


@torch.no_grad()
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("stem", "branch"), [case for case in CASES if case[1] != "columns"])
def test_logits_and_loss_are_those_of_autocast(stem, branch, name):
    """To the bit: what autocast keeps in float32 is not rounded either where the parameters are."""
    low, exact = lowered(stem, branch, DTYPES[name])
    ids, targets = torch.randint(0, 29, (2, 3, 12))
    with torch.autocast("cpu", DTYPES[name]):
        wanted = exact(ids)[0], exact(ids, targets)[1]
    assert torch.equal(low(ids)[0], wanted[0])
    assert torch.equal(low(ids, targets)[1], wanted[1])


@torch.no_grad()
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("stem", PAPER)
def test_decoding_with_a_cache_is_near_float32(stem, name):
    low, exact = lowered(stem, "plain", DTYPES[name])
    ids, cache = torch.randint(0, 29, (3, 12)), low.new_cache()
    parts = [low(part, cache=cache)[0] for part in (ids[:, :5], *ids[:, 5:].split(1, dim=1))]
    assert relative(torch.cat(parts, dim=1), exact(ids)[0]) < 8 * torch.finfo(DTYPES[name]).eps / 2


@pytest.mark.slow
def test_bfloat16_compiles_to_the_same():
    low, _ = lowered("DDL-gpt-mha-rope-EC", "plain", torch.bfloat16)
    ids, targets = torch.randint(0, 29, (2, 3, 12))
    wanted = low(ids, targets)[1]
    found = torch.compile(low, fullgraph=True, backend="aot_eager")(ids, targets)[1]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    found.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in low.parameters())


def autocast_pass(model, ids):
    """Logits under bfloat16 autocast, and the dtypes of all states that were written."""
    dtypes = set()

    def on_write(_site, write):
        dtypes.add(write.state.dtype)

    with torch.autocast("cpu", torch.bfloat16), model.through(ObservedStream(on_write)):
        return model(ids)[0], dtypes


def at_state_dtype(plain, name: str):
    """The model with the same weights and this state_dtype."""
    model = build(
        plain.variant.__module__.removeprefix("model."),
        **{**vars(plain.config), "state_dtype": name},
    )
    model.load_state_dict(plain.state_dict())
    return model


@torch.no_grad()
@pytest.mark.parametrize("stem", PAPER)
def test_the_state_may_stay_in_float32_under_autocast(stem):
    ids, plain = torch.randint(0, 29, (2, 12)), build(stem, **{**TINY, "num_hidden_layers": 3})
    for name in ("bfloat16", "float32"):
        model = at_state_dtype(plain, name)
        # without autocast there is nothing to choose
        assert torch.equal(model(ids)[0], plain(ids)[0])
        logits, dtypes = autocast_pass(model, ids)
        assert dtypes == {getattr(torch, name)}
        cache = model.new_cache()
        with torch.autocast("cpu", torch.bfloat16):
            parts = [model(part, cache=cache)[0] for part in ids.split([5, 1, 6], dim=1)]
        assert relative(torch.cat(parts, dim=1), logits) < 0.02


@torch.no_grad()
@pytest.mark.parametrize("stem", ["gpt-mha-rope", "DDL-gpt-mha-rope"])
def test_a_float32_state_loses_less(stem):
    """Over four models of 12 blocks: the products' own rounding, in bfloat16 in both, is most of
    the rest.
    """
    errors = {"bfloat16": 0.0, "float32": 0.0}
    for seed in range(4):
        torch.manual_seed(seed)
        keys = {"num_hidden_layers": 12, "hidden_size": 64, "head_dim": 16, "init": "normal"}
        plain = build(stem, **{**TINY, **keys})
        ids = torch.randint(0, 29, (2, 12))
        exact = copy.deepcopy(plain).double()(ids)[0]
        for name in errors:
            errors[name] += relative(autocast_pass(at_state_dtype(plain, name), ids)[0], exact)
    assert errors["float32"] < 0.95 * errors["bfloat16"]
