"""The rules by which Inductor lowers our operators."""

import importlib.util

import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_every_operator_gets_a_rule():
    import model.kernels.stream  # noqa: F401
    from model.kernels import lowering, rope  # noqa: F401

    lowering.register_all()
    lowering.register_all()  # and once is enough
    from torch._inductor.lowering import lowerings

    names = {"residual_step", "add_norm", "expand", "rope_norm"}
    names |= {f"{name}_backward" for name in names}
    assert names <= set(torch.ops.ddl)
    assert all(getattr(torch.ops.ddl, name).default in lowerings for name in names)
