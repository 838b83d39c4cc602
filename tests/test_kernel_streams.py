"""Models with fused streams against plain ones.

Training, torch.compile, activation checkpointing, cached generation, and two processes.
"""

import dataclasses
import re

import pytest
import torch
from helpers import ROOT, run_script
from models import AUTHORS, TINY
from torch._functorch import config as functorch_config
from torch.torch_version import TorchVersion

from model.causality import move_parameters

pytest.importorskip("triton")

import fused
from fused import INTERPRETED

from model import build, kernels
from model.block import Block, Stream
from model.ddl import DeltaRewrite, EmbeddingConv, SingleChannelRead
from model.kernels.rope import fused_heads
from model.kernels.stream import DeltaStream
from model.layers import RMSNorm
from model.products import JoinedAttention

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="test_gpu_kernels.py tests the compiled kernels"
)
CC = "DDL-gpt-mha-rope-CC"
TC = "DDL-gpt-mha-rope"
VDIM1 = "DDL-vdim1-gpt-mha-rope"


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    fused.set_num_processors(monkeypatch, 1)


def tiny(model_name, **changes):
    return move_parameters(build(model_name, **{**TINY, **changes}))


V_MAP = {"ddl_map": "v", "ddl_k_hidden_size": 3}
OPTIONS = {
    "two layer gate": (CC, {"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 5}),
    "v-Map": (CC, V_MAP),
    "one column": (VDIM1, {}),
    "v-Map, one column": (VDIM1, V_MAP),
    "constant": (CC, {"ddl_v_constant": True, "ddl_v_constant_value": 1.5}),
    "write only": (CC, {"ddl_update": "write_only", "ddl_v_sigmoid_scale": 2.5}),
    "erase only": (CC, {"ddl_update": "erase_only"}),
    "sigmoid and bias, from context": (CC, {**AUTHORS, "ddl_v_input": "context"}),
    "large guard": (CC, {"ddl_k_eps": 0.5}),
    "eight columns": (CC, {"ddl_value_channels": 8}),
    "one column, three tokens": (
        TC,
        {"ddl_value_channels": 1, "ddl_state_shortconv_kernel_size": 3},
    ),
    "causal pair of three taps": (
        CC,
        {
            "ddl_cc_read": "pair",
            "ddl_state_dv_shortconv_causal": True,
            "ddl_state_shortconv_kernel_size": 3,
        },
    ),
    "factor on what is written": (CC, {"residual_branch_mult": 0.3}),
    "factor on what is added": ("gpt-mha-rope", {"residual_branch_mult": 0.3}),
    "two columns, embedding": ("DDL-gpt-mha-rope-CC-EC", {"ddl_value_channels": 2}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    model_name, keys = OPTIONS[name]
    fused.check_model(tiny(model_name, num_hidden_layers=1, **keys), T=3)


@pytest.mark.parametrize(
    ("capability", "fuses"), [((9, 0), True), ((8, 0), False), ((7, 5), False)]
)
def test_auto_fuses_on_the_gpus_on_which_kernels_were_measured(monkeypatch, capability, fuses):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = kernels.use(tiny(CC), "auto", "cuda")
    assert (reason is None) == fuses
    assert fuses or f"this GPU has {capability[0]}.{capability[1]}; kernels=on" in reason
    assert kernels.use(tiny(CC), "on", "cuda") is None


def test_a_write_with_a_config_of_its_own_uses_plain_operations():
    model = tiny(CC)
    write = model.transformer.h[1].ddl_mlp
    write.config = dataclasses.replace(write.config, ddl_k_eps=0.1)
    assert "a config of its own has no fused kernel" in kernels.reason_not_fused(model)


def test_intervals_change_no_bit():
    fused.check_intervals(tiny(CC, ddl_value_channels=2), torch.bfloat16, (1, 4), T=3)


@pytest.mark.parametrize(
    ("interval", "replayed"), [(1, [0, 0, 0, 0, 1]), (2, [0, 1, 0, 1, 2]), (4, [0, 1, 2, 3, 4])]
)
def test_a_state_is_stored_once_an_interval(interval, replayed, monkeypatch):
    """Count the writes since the last stored state after each of five reads.

    The state of the readout is never stored.
    """
    step = DeltaStream.step
    writes = []

    def count_writes(*args, **options):
        state, read_output, context = step(*args, **options)
        writes.append(len(state.directions))
        return state, read_output, context

    monkeypatch.setattr(DeltaStream, "step", count_writes)
    model = fused.fuse(tiny("DDL-vdim1-gpt-mha-rope"), interval)
    with torch.no_grad():
        model(fused.tokens_of(model, T=2)[0])
    assert writes == replayed


def test_compiles_without_graph_breaks():
    # Around the kernels the compiler decomposes norms and losses: another order of float32 sums.
    fused.check_compiled(tiny(CC, num_hidden_layers=1), "aot_eager", 3e-5)


def test_activation_checkpointing():
    fused.check_checkpointing(tiny(CC, num_hidden_layers=1))


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float32"])
def test_autocast(state_dtype):
    """Products stay in bfloat16 beside a state in float32."""
    model = tiny(CC, state_dtype=state_dtype, num_hidden_layers=1)
    fused.check_autocast(model, torch.bfloat16, T=3)


def test_cached_generation():
    fused.check_cached(tiny("DDL-gpt-mha-rope-EC"), (2, 1, 2))


@pytest.mark.slow
def test_two_processes():
    """Gradients averaged by DDP and FSDP2 equal those of the plain model in one process."""
    result = run_script(ROOT / "tests" / "two_processes.py", env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr.decode()


# (settings, why the model has no fused kernels)
WITHOUT_KERNELS = [
    ({"ddl_value_channels": 3}, "ddl_value_channels=3 has no fused kernel (supported: 1, 2, 4, 8)"),
    (
        {"ddl_map": "v", "ddl_k_branch": "attention"},
        "ddl_k_branch=attention has no fused kernel (supported: mlp)",
    ),
    (
        {"ddl_map": "v", "ddl_k_input": "mean"},
        "ddl_k_input=mean has no fused kernel (supported: read)",
    ),
    ({"ddl_k_norm": "shifted"}, "ddl_k_norm=shifted has no fused kernel (supported: guarded)"),
    (
        {"ddl_beta_input": "flat"},
        "ddl_beta_input=flat has no fused kernel (supported: context)",
    ),
    (
        {"residual_branch_mult": 1.5},
        "residual_branch_mult=1.5 has no fused kernel (supported: at most 1)",
    ),
]


@pytest.mark.parametrize(("settings", "reason"), WITHOUT_KERNELS)
def test_a_model_without_kernels_stays_as_it_is_and_kernels_on_is_refused(settings, reason):
    model = build(CC, **{**TINY, **settings})
    assert kernels.use(model, "auto", "cuda") == reason
    assert type(model.stream) is Stream
    message = re.escape(f"kernels=on: {reason}; use kernels=auto or kernels=off")
    with pytest.raises(ValueError, match=message):
        kernels.use(model, "on", "cpu")


def test_keys_of_the_v_map_do_not_count_in_the_k_map():
    assert kernels.reason_not_fused(build(CC, **TINY, ddl_k_input="mean")) is None


def test_kernels_on_needs_a_cuda_device_or_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="fused kernels need a CUDA device"):
        kernels.use(build(CC, **TINY), "on", "cpu")


def test_kernels_on_needs_triton(monkeypatch):
    model = build(CC, **TINY)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install triton"):
        kernels.use(model, "on", "cuda")


class OtherWrite(DeltaRewrite):
    pass


class OtherBlock(Block):
    def forward(self, state, positions, cache=None):
        return state


class OtherRead(SingleChannelRead):
    pass


class OtherNorm(RMSNorm):
    pass


@pytest.mark.parametrize(
    ("module", "other", "part"),
    [
        ("transformer.h.1.ddl_attn", OtherWrite, "OtherWrite"),
        ("transformer.h.1", OtherBlock, "OtherBlock.forward"),
        ("transformer.h.1.compress", OtherRead, "OtherRead"),
        ("transformer.h.1.ln_2", OtherNorm, "OtherNorm"),
        ("readout", OtherRead, "OtherRead"),
        ("ln_f", OtherNorm, "OtherNorm"),
    ],
)
def test_a_stream_of_ones_own_is_left_alone(module, other, part):
    """A subclass is not in the table of what is supported, in whatever block it is."""
    model = build(CC, **TINY)
    model.get_submodule(module).__class__ = other
    with pytest.raises(ValueError, match=re.escape(f"kernels=on: {part} has no fused kernel")):
        kernels.use(model, "on", "cpu")
    assert type(model.stream) is Stream


class DoubledEmbedding(EmbeddingConv):
    def forward(self, x, past=None):
        return super().forward(2 * x, past)


def test_an_expansion_of_ones_own_is_kept():
    """The fused stream starts from the state of any expander."""
    model = tiny("DDL-gpt-mha-rope-CC-EC")
    model.input_embed.__class__ = DoubledEmbedding
    tokens = fused.tokens_of(model)
    plain = model(*tokens)[1]
    assert torch.allclose(fused.fuse(model)(*tokens)[1], plain, rtol=1e-5)


class OtherAttention(JoinedAttention):
    pass


def test_heads_of_ones_own_are_left_alone():
    model = build(CC, **TINY)
    model.transformer.h[1].attn.__class__ = OtherAttention
    assert kernels.use(model, "on", "cpu") is None
    assert {block.attn.fused_heads for block in model.transformer.h} == {None}
    attention = model.transformer.h[1].attn
    attention.__class__ = JoinedAttention
    # the kernel adds the same eps to queries and keys
    attention.k_rms.eps *= 2
    assert kernels.use(model, "on", "cpu") is None
    assert {block.attn.fused_heads for block in model.transformer.h} == {None}
    attention.k_rms.eps = attention.q_rms.eps
    assert kernels.use(model, "on", "cpu") is None
    assert {block.attn.fused_heads for block in model.transformer.h} == {fused_heads}


@pytest.mark.parametrize("name", ["HC", "MUDD"])
def test_heads_are_fused_in_a_stream_that_is_not(name):
    """MUDD's attention has separate inputs, which the kernel of the heads does not take."""
    model = tiny(f"{name}-gpt-mha-rope")
    ids, targets, *_ = fused.tokens_of(model)
    plain = model(ids, targets)[1]
    assert "has no fused kernel" in kernels.use(model, "auto", "cuda")
    assert {block.attn.fused_heads for block in model.transformer.h} == {fused_heads}
    assert type(model.stream) is Stream
    assert torch.allclose(model(ids, targets)[1], plain, rtol=1e-5)


@pytest.mark.parametrize(
    ("model_name", "keys", "setting", "parts"),
    [
        (CC, {}, "auto", "residual stream, heads of attention"),
        (CC, {}, "on", "residual stream, heads of attention, SwiGLU"),
        ("gpt-mha-rope", {}, "auto", "heads of attention"),
        ("gpt-mha-rope", {"use_qk_rmsnorm": False}, "on", "SwiGLU"),
        ("HC-gpt-mha-rope", {}, "auto", "heads of attention"),
    ],
)
def test_the_fused_parts_of_a_model_are_named(model_name, keys, setting, parts):
    model = tiny(model_name, **keys)
    reason = kernels.use(model, setting, "cuda")
    description, _, reason_not_fused = kernels.describe(model, reason).partition(" (")
    assert description == f"fused kernels: {parts}"
    assert reason_not_fused.startswith("MixAndAdd") == (model_name[:2] == "HC")


def test_auto_on_a_cpu_is_plain_and_off_takes_the_kernels_away():
    model = build(CC, **TINY)
    modules = [model, *model.transformer.h]
    assert "CUDA" in kernels.use(model, "auto", "cpu")
    assert {type(module.stream) for module in modules} == {Stream}
    assert kernels.use(model, "on", "cpu") is None
    assert {type(module.stream) for module in modules} != {Stream}
    assert kernels.use(model, "auto", "cuda") is None
    assert "kernels=off" in kernels.use(model, "off", "cpu")
    assert {type(module.stream) for module in modules} == {Stream}


@pytest.mark.parametrize("model_name", [CC, "gpt-mha-rope"])
def test_float64_is_refused(model_name):
    model = fused.fuse(tiny(model_name)).double()
    with pytest.raises(ValueError, match=r"dtype torch\.float64; use kernels=off"):
        model(*fused.tokens_of(model))


def test_torch_2_12_is_kept_from_writing_to_strides_of_0(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    with functorch_config.patch(guess_tangent_strides_as_outputs=True):
        kernels.use(build(TC, **TINY), "on", "cpu")
        assert functorch_config.guess_tangent_strides_as_outputs is False
