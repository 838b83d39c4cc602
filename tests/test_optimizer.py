"""Parameter groups, schedules and optimizer state by name."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from models import PAPER, TINY

from model import build
from model.weights import EMBEDDING
from training import optimizer


def settings(**changes):
    values = {
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
    }
    values |= {
        "min_lr": None,
        "warmup_steps": 10,
        "max_steps": 110,
        "schedule": "cosine",
        "decay_steps": 40,
    }
    values |= {
        "muon_learning_rate": None,
        "embedding_learning_rate": None,
        "weight_decay_rate": None,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("stem", PAPER)
def test_every_parameter_is_in_exactly_one_group(stem, name):
    model = build(stem, **TINY)
    optimizers = optimizer.build_optimizers(model, settings(optimizer=name))
    names = [n for o in optimizers for g in o.param_groups for n in g["names"]]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    for o in optimizers:
        for g in o.param_groups:
            for n, p in zip(g["names"], g["params"]):
                assert model.get_parameter(n) is p
                assert g["weight_decay"] == (0.1 if p.ndim >= 2 else 0.0), n


def test_muon_takes_the_sublayers_matrices_only():
    model = build("DDL-gpt-mha-rope", **TINY)
    adam, muon = optimizer.build_optimizers(model, settings(optimizer="muon"))
    assert isinstance(muon, torch.optim.Muon)
    parts = (
        "attn.c_q",
        "attn.c_k",
        "attn.c_v",
        "attn.c_proj",
        "mlp.c_fc1",
        "mlp.c_fc2",
        "mlp.c_proj",
    )
    expected = sorted(f"transformer.h.{i}.{part}.weight" for i in range(2) for part in parts)
    assert sorted(n for g in muon.param_groups for n in g["names"]) == expected
    assert not set(expected) & {n for g in adam.param_groups for n in g["names"]}


def muon_steps(made, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Three matrices, one of them without gradients, after three steps of the optimizer that `made`
    makes.
    """
    torch.manual_seed(0)
    weights = [
        torch.nn.Parameter(torch.randn(*shape).to(dtype)) for shape in ((12, 5), (6, 20), (4, 4))
    ]
    optimizer = made([{"params": weights, "weight_decay": 0.1}])
    for _ in range(3):
        for weight in weights[:2]:
            weight.grad = torch.randn(*weight.shape).to(dtype)
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_muon_steps_as_torch_does_and_in_float32_nearer_to_what_float64_gives():
    given = {"lr": 0.03, "adjust_lr_fn": "match_rms_adamw"}
    theirs = muon_steps(lambda groups: torch.optim.Muon(groups, **given))
    assert all(
        map(
            torch.equal,
            muon_steps(lambda groups: optimizer.Muon(groups, 0.03, torch.bfloat16)),
            theirs,
        )
    )
    exact = muon_steps(lambda groups: optimizer.Muon(groups, 0.03, torch.float64), torch.float64)
    for one, other in zip(
        muon_steps(lambda groups: optimizer.Muon(groups, 0.03, torch.float32)), exact
    ):
        torch.testing.assert_close(one.double(), other, atol=3e-6, rtol=0)
    assert max((one.double() - other).abs().max() for one, other in zip(theirs, exact)) > 1e-4


@pytest.mark.parametrize("shape", [(12, 5), (6, 20), (8, 8)])
def test_muon_keeps_singular_vectors_and_brings_singular_values_near_1(shape):
    matrix = torch.randn(*shape, dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    [group] = torch.optim.Muon([torch.nn.Parameter(matrix)]).param_groups
    found = optimizer.orthogonal(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
    inner = u.T @ found @ v.T
    torch.testing.assert_close(inner, torch.diag(inner.diagonal()), atol=1e-9, rtol=0)
    torch.testing.assert_close(u @ inner @ v, found)
    wanted = values > 0.05 * values.norm()  # five steps do not reach smaller ones
    assert inner.diagonal()[wanted].min() > 0.5
    assert inner.diagonal().max() < 1.3


def test_mup_scales_the_learning_rate_of_matrices():
    model = build(
        "DDL-gpt-mha-rope", mup=True, hidden_size_base=40, ddl_beta_single_linear=False, **TINY
    )
    [adam] = optimizer.build_optimizers(model, settings())
    optimizer.set_learning_rate([adam], 0.5)
    rates = {n: g["lr"] for g in adam.param_groups for n in g["names"]}
    for name, rate in rates.items():
        hidden = any(
            part in name for part in (".attn.c_", ".mlp.c_", ".beta_in.weight", ".v_proj.weight")
        )
        assert rate == (2.0 if hidden else 0.5), name


@pytest.mark.parametrize(
    ("keys", "with_muon", "scales"),
    [
        (
            {},
            False,
            {
                "attn.c_q": 4,
                "mlp.c_proj": 4,
                "ddl_attn.v_proj": 4,
                "ln_1": 1,
                "compress.shortconv": 1,
            },
        ),
        (
            {},
            True,
            {
                "attn.c_q": 2,
                "mlp.c_proj": 2,
                "ddl_attn.v_proj": 4,
                "ln_1": 1,
                "compress.shortconv": 1,
            },
        ),
        ({"ddl_map": "v"}, False, {"ddl_attn.k_in": 4, "ddl_attn.k_out": 1}),
        ({"ddl_map": "v", "init": "normal"}, False, {"ddl_attn.k_in": 4, "ddl_attn.k_out": 2}),
    ],
)
def test_mup_scales_by_the_kind_of_parameter(keys, with_muon, scales):
    model = build("DDL-gpt-mha-rope", mup=True, hidden_size_base=40, **TINY, **keys)
    found = optimizer.lr_scales(model, with_muon)
    for name, scale in scales.items():
        assert found.get(f"transformer.h.0.{name}.weight", 1) == scale, name
    assert not optimizer.lr_scales(build("DDL-gpt-mha-rope", **TINY), with_muon)


def rates_of(optimizers) -> dict[str, float]:
    return {
        name: group["lr"]
        for each in optimizers
        for group in each.param_groups
        for name in group["names"]
    }


def test_a_rule_s_factor_and_mup_s_multiply():
    model = build("DDL-gpt-mha-rope", mup=True, hidden_size_base=40, **TINY)  # m = 4
    for block in model.transformer.h:
        for layer, factor in ((block.attn.c_q, 0.01), (block.ln_1, 0.5)):
            layer.rules = {"weight": layer.rules["weight"]._replace(rate=factor)}
    for name, mup in (("adamw", 4), ("muon", 2)):
        optimizers = optimizer.build_optimizers(model, settings(optimizer=name))
        optimizer.set_learning_rate(optimizers, 0.5)
        rates = rates_of(optimizers)
        assert rates["transformer.h.1.attn.c_q.weight"] == pytest.approx(0.5 * mup * 0.01)
        assert rates["transformer.h.1.attn.c_k.weight"] == 0.5 * mup
        assert rates["transformer.h.1.ln_1.weight"] == 0.25
        assert rates["transformer.h.1.ln_2.weight"] == 0.5
        scales = optimizer.lr_scales(model, name == "muon")
        assert scales["transformer.h.1.ln_1.weight"] == 0.5  # so that a checkpoint knows it


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("min_lr", [None, 1e-4, 0.0])
def test_every_group_has_its_peak_and_the_same_schedule(schedule, min_lr):
    model = build("gpt-mha-rope", **TINY)
    keys = {
        "muon_learning_rate": 1e-2,
        "embedding_learning_rate": 4e-3,
        "schedule": schedule,
        "min_lr": min_lr,
    }
    config = settings(optimizer="muon", **keys)
    optimizers = optimizer.build_optimizers(model, config)
    muon = {name for group in optimizers[1].param_groups for name in group["names"]}
    for step in range(110):
        said = optimizer.set_rates(optimizers, step, config)
        share = optimizer.learning_rate_at(step, settings(schedule=schedule, min_lr=min_lr)) / 1e-3
        assert said == pytest.approx(
            {"lr": 1e-3 * share, "muon_lr": 1e-2 * share, "embedding_lr": 4e-3 * share}
        )
        for name, rate in rates_of(optimizers).items():
            own = "muon_lr" if name in muon else "embedding_lr" if name == EMBEDDING else "lr"
            assert rate == said[own], name
    assert share == pytest.approx({None: 0.05, 1e-4: 0.1, 0.0: 0.0}[min_lr], abs=1e-12)


def test_without_peaks_of_their_own_all_have_the_one_rate():
    for kind in ("adamw", "muon"):
        config = settings(optimizer=kind)
        optimizers = optimizer.build_optimizers(build("gpt-mha-rope", **TINY), config)
        for step in (0, 50, 109):
            rate = optimizer.learning_rate_at(step, config)
            assert optimizer.set_rates(optimizers, step, config) == {"lr": rate}
            assert set(rates_of(optimizers).values()) == {rate}


def test_adamw_at_a_rate_of_0_leaves_muon_s():
    config = settings(optimizer="muon", learning_rate=0.0, muon_learning_rate=1e-2, min_lr=0.0)
    optimizers = optimizer.build_optimizers(build("gpt-mha-rope", **TINY), config)
    rates = optimizer.set_rates(optimizers, 59, config)  # half of the cosine
    assert rates == {"lr": 0.0, "muon_lr": pytest.approx(5e-3)}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("step", [4, 10, 109])
def test_decay_of_its_own_rate_is_the_same_for_every_weight(kind, step):
    """Against the same step without decay: both update alike, so that they differ by what
    decays.
    """
    keys = {
        "learning_rate": 3e-3,
        "embedding_learning_rate": 7e-3,
        "min_lr": 0.0 if step == 109 else None,
    }
    keys |= {"optimizer": kind, "muon_learning_rate": 2e-2 if kind == "muon" else None}
    torch.manual_seed(0)
    model = build("DDL-gpt-mha-rope", mup=True, hidden_size_base=40, **TINY)
    plain = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    share = optimizer.learning_rate_at(step, settings(**keys)) / 3e-3
    for each, decay in (
        (model, {"weight_decay": 0.1, "weight_decay_rate": 0.5}),
        (plain, {"weight_decay": 0.0}),
    ):
        config = settings(**keys, **decay)
        optimizers = optimizer.build_optimizers(each, config)
        optimizer.set_rates(optimizers, step, config)
        ids = torch.arange(16).view(2, 8)
        each(ids, ids)[1].backward()
        for one in optimizers:
            one.step()
    for name, p in model.named_parameters():
        lost = 0.1 * 0.5 * share * before[name] if p.ndim >= 2 else torch.zeros_like(p)
        torch.testing.assert_close(plain.get_parameter(name) - p, lost, rtol=0, atol=3e-7)
        assert p.ndim < 2 or step == 109 or lost.abs().max() > 1e-4, name


def test_warmup_and_cosine():
    rates = [optimizer.learning_rate_at(step, settings()) for step in range(110)]
    assert rates[:10] == pytest.approx([1e-4 * (i + 1) for i in range(10)])
    assert rates[59] == pytest.approx((1e-3 + 5e-5) / 2)
    assert rates[34] == pytest.approx(5e-5 + 9.5e-4 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[109] == pytest.approx(5e-5, rel=1e-12)
    assert rates[9:] == sorted(set(rates[9:]), reverse=True)
    assert optimizer.learning_rate_at(109, settings(min_lr=0.0)) == 0
    assert optimizer.learning_rate_at(4, settings(warmup_steps=0)) == pytest.approx(1e-3, rel=1e-2)


def test_warmup_stable_decay():
    rates = [
        optimizer.learning_rate_at(step, settings(schedule="wsd", min_lr=1e-4))
        for step in range(110)
    ]
    assert rates[:10] == pytest.approx([1e-4 * (i + 1) for i in range(10)])
    assert rates[10:70] == [1e-3] * 60
    assert rates[69:] == pytest.approx([1e-3 - 9e-4 * i / 40 for i in range(41)])
    short = settings(schedule="wsd", min_lr=0.0, decay_steps=5)
    assert [optimizer.learning_rate_at(step, short) for step in range(105, 110)] == pytest.approx(
        [8e-4, 6e-4, 4e-4, 2e-4, 0], abs=1e-18
    )
    assert optimizer.learning_rate_at(109, settings(schedule="wsd", decay_steps=0)) == 1e-3


@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(12, 2, 2), (300, 100, 60), (10, 9, 1), (3, 5, 0), (4, 0, 0)]
)
def test_a_fifth_of_the_run_decays(steps, warmup, decay):
    config = settings(
        schedule="wsd", min_lr=0.0, decay_steps=None, max_steps=steps, warmup_steps=warmup
    )
    rates = [optimizer.learning_rate_at(step, config) for step in range(steps)]
    rise = [1e-3 * (step + 1) / warmup for step in range(min(warmup, steps))]
    fall = [1e-3 * left / decay for left in reversed(range(decay))]
    assert rates == pytest.approx(rise + [1e-3] * (steps - len(rise) - decay) + fall, abs=1e-18)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_named_state_continues_the_optimizer(name):
    def train(model, optimizers, steps):
        for _ in range(steps):
            _, loss = model(ids, ids)
            loss.backward()
            for o in optimizers:
                o.step()
                o.zero_grad()

    ids = torch.randint(0, 29, (2, 8))
    first = build("DDL-gpt-mha-rope", **TINY)
    before = optimizer.build_optimizers(first, settings(optimizer=name))
    train(first, before, 3)
    state = {key: value.clone() for key, value in optimizer.named_state(before).items()}
    second = build("DDL-gpt-mha-rope", **TINY)
    second.load_state_dict(first.state_dict())
    after = optimizer.build_optimizers(second, settings(optimizer=name))
    optimizer.load_named_state(after, state)
    train(first, before, 2)
    train(second, after, 2)
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a, b)


def test_state_of_another_model_is_refused():
    model = build("gpt-mha-rope", **TINY)
    [adam] = optimizer.build_optimizers(model, settings())
    names = {f"{name}:step": torch.zeros(()) for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=r"state for elsewhere:exp_avg"):
        optimizer.load_named_state([adam], {**names, "elsewhere:exp_avg": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"no state for transformer\.wte\.weight"):
        optimizer.load_named_state([adam], {key: names[key] for key in names if ".wte." not in key})


def test_a_run_without_a_step_yet_has_no_state():
    model = build("gpt-mha-rope", **TINY)
    [adam] = optimizer.build_optimizers(model, settings())
    assert optimizer.named_state([adam]) == {}
    optimizer.load_named_state([adam], {})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    assert len(optimizer.named_state([adam])) == 3 * len(list(model.parameters()))
