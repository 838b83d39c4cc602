"""Models with parameters in bfloat16 or float16 compute what autocast does, close to float32."""

import copy
from typing import NamedTuple

import pytest
import torch
from models import INPUTS, PAPER, TINY

from model import MODEL_NAMES, build
from model.gpt import GPT
from training.residual_statistics import ObservedStream

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIONS = {
    "plain": {},
    "vmap": {"ddl_map": "v"},
    "gate": {"ddl_beta_single_linear": False},
    "columns": {"ddl_map": "v", "ddl_k_branch": "attention"},
    "columns of a float32 state": {
        "ddl_map": "v",
        "ddl_k_branch": "attention",
        "state_dtype": "float32",
    },
    **INPUTS,
}
# (model name, name of the options); all DDL models share their write
CASES = [
    *[(model_name, "plain") for model_name in PAPER],
    *[("DDL-vdim1-gpt-mha-rope", options_name) for options_name in ("vmap", "gate")],
    # attention over columns needs several of them
    *[("DDL-gpt-mha-rope-CC", options_name) for options_name in OPTIONS if options_name != "plain"],
]
OTHER_STREAMS = [(model_name, "plain") for model_name in MODEL_NAMES if model_name not in PAPER]


def build_rounded(model_name: str, options_name: str, dtype: torch.dtype) -> tuple[GPT, GPT]:
    """Return a model in dtype, and in float32 the model with the same, rounded weights."""
    settings = {**TINY, "hidden_size": 32, "head_dim": 16}
    model = build(model_name, **settings, **OPTIONS[options_name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype)
    return model, copy.deepcopy(model).float()


class Pass(NamedTuple):
    """The results of a forward and backward pass."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradient: torch.Tensor  # of all parameters, as one vector


def run_pass(model: GPT, ids: torch.Tensor, targets: torch.Tensor) -> Pass:
    logits, loss = model(ids, targets, return_logits=True)
    loss.backward()
    gradient = torch.cat(
        [
            parameter.grad.float().flatten()
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
    )
    return Pass(logits.detach(), loss.detach(), gradient)


def relative_error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((computed.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize(("model_name", "options_name"), [*CASES, *OTHER_STREAMS])
def test_forward_and_backward_are_near_float32(model_name, options_name, dtype_name):
    dtype = DTYPES[dtype_name]
    model, float32_model = build_rounded(model_name, options_name, dtype)
    ids, targets = torch.randint(0, 29, (2, 3, 12))
    computed = run_pass(model, ids, targets)
    expected = run_pass(float32_model, ids, targets)
    assert computed.logits.dtype == torch.float32
    assert computed.loss.dtype == torch.float32
    # The unit of rounding is 2^-8 in bfloat16 and 2^-11 in float16. Errors of 3 units were measured,
    # and of 6 in gradients.
    unit = torch.finfo(dtype).eps / 2
    assert relative_error(computed.logits, expected.logits) < 8 * unit
    assert relative_error(computed.loss, expected.loss) < 4 * unit
    assert relative_error(computed.gradient, expected.gradient) < 16 * unit


@torch.no_grad()
@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize(
    ("model_name", "options_name"), [case for case in CASES if not case[1].startswith("columns")]
)
def test_logits_and_loss_are_those_of_autocast(model_name, options_name, dtype_name):
    """They are equal to the bit, because the same operations are computed in float32."""
    dtype = DTYPES[dtype_name]
    model, float32_model = build_rounded(model_name, options_name, dtype)
    ids, targets = torch.randint(0, 29, (2, 3, 12))
    with torch.autocast("cpu", dtype):
        expected_logits, _ = float32_model(ids)
        _, expected_loss = float32_model(ids, targets)
    assert torch.equal(model(ids)[0], expected_logits)
    assert torch.equal(model(ids, targets)[1], expected_loss)


@torch.no_grad()
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_decoding_with_a_cache_is_near_float32(dtype_name):
    """The model caches tokens for both of its convolutions."""
    dtype = DTYPES[dtype_name]
    model, float32_model = build_rounded("DDL-gpt-mha-rope-EC", "plain", dtype)
    ids = torch.randint(0, 29, (3, 12))
    cache = model.new_cache()
    # the first five tokens at once, and the others one by one
    chunks = ids.split([5, 1, 1, 1, 1, 1, 1, 1], dim=1)
    logits = torch.cat([model(chunk, cache=cache)[0] for chunk in chunks], dim=1)
    assert relative_error(logits, float32_model(ids)[0]) < 8 * torch.finfo(dtype).eps / 2


# ---- the state in float32 under autocast ----


def run_autocast(model: GPT, ids: torch.Tensor) -> tuple[torch.Tensor, set[torch.dtype]]:
    """Return the logits under bfloat16 autocast and the dtypes of all states that were written."""
    dtypes = set()

    def record_dtype(_site, write):
        dtypes.add(write.state.dtype)

    with torch.autocast("cpu", torch.bfloat16), model.through(ObservedStream(record_dtype)):
        logits, _ = model(ids)
    return logits, dtypes


def rebuild(model: GPT, model_name: str, state_dtype: str) -> GPT:
    """Return the model with the same weights and another state_dtype."""
    rebuilt = build(model_name, **{**vars(model.config), "state_dtype": state_dtype})
    rebuilt.load_state_dict(model.state_dict())
    return rebuilt


@torch.no_grad()
@pytest.mark.parametrize("state_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_name", ["gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC"])
def test_the_state_has_state_dtype_under_autocast_alone(model_name, state_dtype):
    default = build(model_name, **{**TINY, "num_hidden_layers": 3})
    model = rebuild(default, model_name, state_dtype)
    ids = torch.randint(0, 29, (2, 12))
    _, dtypes = run_autocast(model, ids)
    assert dtypes == {getattr(torch, state_dtype)}
    assert torch.equal(model(ids)[0], default(ids)[0])
