"""The models against SPEC's counts and names, and against the plain-loop implementation of naive.py."""

import dataclasses
import math
from collections import OrderedDict

import naive
import pytest
import torch
from contract import randomise

from model import build

# The published facts: parameters of the small size.
PARAMETER_COUNTS = {
    "gpt-mha-rope": 123_590_400,
    "DDL-vdim1-gpt-mha-rope": 123_627_312,
    "DDL-gpt-mha-rope": 123_842_476,
    "DDL-gpt-mha-rope-EC": 123_854_764,
    "DDL-gpt-mha-rope-CC": 123_722_616,
    "DDL-gpt-mha-rope-CC-EC": 123_734_904,
}
PAPER = list(PARAMETER_COUNTS)  # the paper's stems; test_contract.py has what holds for every stem
DDL = PAPER[1:]
TINY = {"vocab_size": 29, "block_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 6}
TINY |= {"hidden_size": 10}
SMALL = {"num_hidden_layers": 12, "num_attention_heads": 6, "head_dim": 128, "hidden_size": 768}
MEDIUM = {"num_hidden_layers": 24, "num_attention_heads": 8, "head_dim": 128, "hidden_size": 1024}


def tiny(stem, **changes):
    return randomise(build(stem, **{**TINY, **changes}).double())


@pytest.mark.parametrize("stem", PAPER)
def test_parameter_count_of_the_small_size(stem):
    with torch.device("meta"):
        assert build(stem, **SMALL).num_parameters() == PARAMETER_COUNTS[stem]


def test_parameter_count_of_the_medium_baseline():
    with torch.device("meta"):
        assert build("gpt-mha-rope", **MEDIUM).num_parameters() == 353_508_352


TOKEN_READ, COLUMN_READ = ["compress.shortconv.weight", "compress.read"], ["compress.weight"]
READ_NAMES = {"DDL-gpt-mha-rope": TOKEN_READ, "DDL-gpt-mha-rope-EC": TOKEN_READ}
READ_NAMES |= {"DDL-gpt-mha-rope-CC": COLUMN_READ, "DDL-gpt-mha-rope-CC-EC": COLUMN_READ}


def expected_names(stem, layers):
    names = ["transformer.wte.weight", "lm_head.weight", "ln_f.weight"]
    for i in range(layers):
        block = f"transformer.h.{i}."
        names += [f"{block}{n}.weight" for n in ("ln_1", "ln_2", "mlp.c_fc1", "mlp.c_fc2", "mlp.c_proj")]
        names += [f"{block}attn.{n}.weight" for n in ("c_q", "c_k", "c_v", "c_proj", "q_rms", "k_rms")]
        if stem.startswith("DDL"):
            for site in ("ddl_attn", "ddl_mlp"):
                names += [f"{block}{site}.{n}" for n in ("beta.weight", "beta.bias", "v_proj.weight", "v_proj.bias")]
        names += [f"{block}{name}" for name in READ_NAMES.get(stem, [])]
    names += [name.replace("compress", "readout") for name in READ_NAMES.get(stem, [])]
    names += ["input_embed.conv.weight"] * stem.endswith("-EC")
    return sorted(names)


@pytest.mark.parametrize("stem", PAPER)
def test_state_dict_names(stem):
    model = build(stem, **TINY)
    assert sorted(model.state_dict()) == expected_names(stem, TINY["num_hidden_layers"])
    assert model.lm_head.weight is model.transformer.wte.weight


PARAMETERISATIONS = OrderedDict(
    plain={},
    two_layer_gate={"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 5},
    no_sigmoid_from_context={"ddl_v_sigmoid": False, "ddl_v_input": "context"},
    constant_value={"ddl_v_constant": True, "ddl_v_constant_value": 1.5},
    write_only={"ddl_update": "write_only", "ddl_v_sigmoid_scale": 2.5},
    large_guard={"ddl_k_eps": 0.5},
    v_map={"ddl_map": "v", "ddl_k_hidden_size": 3},
)
CASES = [("gpt-mha-rope", {}), ("gpt-mha-rope", {"rope_ratio": 0.5, "mup": True, "use_qk_rmsnorm": False})]
CASES += [(stem, keys) for stem in DDL for keys in PARAMETERISATIONS.values()]
CASES += [
    ("DDL-gpt-mha-rope", {"ddl_value_channels": v, "ddl_state_shortconv_kernel_size": k})
    for v, k in ((1, 3), (2, 1), (8, 2))
]
EXPANDED = [stem for stem in DDL if "vdim1" not in stem]
CASES += [(stem, {"ddl_map": "v", "ddl_k_branch": "attention"}) for stem in EXPANDED]
CASES += [(stem, {"ddl_value_channels": v}) for stem in EXPANDED[1:] for v in (1, 2, 8)]
CASES += [("DDL-gpt-mha-rope-CC-EC", {"input_embed_shortconv_kernel_size": k}) for k in (1, 2)]
CASES += [("DDL-gpt-mha-rope-EC", {"ddl_value_channels": 1, "ddl_map": "v", "ddl_k_hidden_size": 4})]


@pytest.mark.parametrize(("stem", "keys"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain")
def test_forward_and_backward_equal_the_naive_loops(stem, keys):
    model = tiny(stem, **keys)
    ids = torch.randint(0, TINY["vocab_size"], (2, 7))
    targets = torch.randint(0, TINY["vocab_size"], (2, 7))
    targets[0, 3] = -1
    logits, loss = model(ids, targets, return_logits=True)
    loss.backward()

    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    naive_weights = {**weights, "lm_head.weight": weights["transformer.wte.weight"]}
    config = dataclasses.asdict(model.config)
    reference = naive.loss(stem, naive_weights, config, ids.tolist(), targets.tolist())
    reference.backward()
    torch.testing.assert_close(loss, reference, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        logits[1], naive.logits(stem, naive_weights, config, ids[1].tolist()), rtol=1e-9, atol=1e-9
    )
    for name, parameter in model.named_parameters():
        if weights[name].grad is None:  # the constant write value leaves v_proj out on both sides
            assert parameter.grad is None
            assert "v_proj" in name
        else:
            torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("stem", PAPER)
def test_inductor_compiles_the_same(stem):
    model = tiny(stem)
    ids, targets = torch.randint(0, 29, (2, 2, 8))
    _, loss = model(ids, targets)
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    _, compiled = torch.compile(model, fullgraph=True)(ids, targets)
    compiled.backward()
    torch.testing.assert_close(
        [compiled, *(p.grad for p in model.parameters())], [loss, *expected], rtol=1e-9, atol=1e-9
    )


def test_forward_contract():
    model = build("gpt-mha-rope", **TINY)
    ids = torch.randint(0, 29, (2, 5))
    logits, loss = model(ids)
    assert logits.shape == (2, 5, 29)
    assert loss is None
    logits, loss = model(ids, ids)
    assert logits is None
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    with pytest.raises(ValueError, match=r"17 tokens do not fit block_size=16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_rope_tables_survive_changes_of_dtype():
    model = build("gpt-mha-rope", **TINY)
    assert model.rope_cos.dtype == torch.float32
    angle = 3 * 10000 ** (-2 / 6)  # position 3, pair 1 of head_dim 6
    assert model.double().rope_cos[3, 1].item() == pytest.approx(math.cos(angle), abs=1e-15)
    assert model.bfloat16().rope_sin[3, 1].item() == pytest.approx(math.sin(angle), abs=1e-7)


# Initialisation (SPEC section 4): standard deviation by parameter, at a width where 5% is far from chance.
@pytest.fixture(scope="module")
def initialised():
    torch.manual_seed(0)
    size = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "num_hidden_layers": 4, "vocab_size": 512}
    return build("DDL-gpt-mha-rope", ddl_beta_init=0.5, **size)
