"""Run by test_lowering.py: which operators Inductor has rules for, and how it lowers a deep model.

Each task runs under a torch that says it is 2.11, in a process of its own. It is forked from this
one, which has imported only torch, so that rules and operators of one task do not exist in the next.
Prints JSON.
"""

import collections
import contextlib
import json
import multiprocessing
import re
import sys
import types

import torch
from torch.torch_version import TorchVersion

TINY = {
    "vocab_size": 64,
    "block_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "hidden_size": 32,
}
CALL = re.compile(r"^ +(?:\w+ = )?(cpp_fused|extern_kernels\.\w+|torch\.ops\.[\w.]+)\w*\(", re.M)


def rules(setting: str, *model_names: str) -> dict:
    """Use kernels in each model, and return our operators and those of them without a rule."""
    from model import build, kernels

    for model_name in model_names:
        kernels.use(build(model_name, **TINY), setting, "cuda")
    from torch._inductor.lowering import lowerings

    with_rule = {str(operator) for operator in lowerings}
    operators = [
        name.removeprefix("ddl::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("ddl::")
    ]
    return {
        "operators": operators,
        "without": [name for name in operators if f"ddl.{name}.default" not in with_rule],
    }


def imports() -> bool:
    """Return whether `use` imports Inductor."""
    from model import build, kernels

    kernels.use(build("DDL-gpt-mha-rope", **TINY), "on", "cuda")
    return "torch._inductor.lowering" in sys.modules


class Lowered(Exception):  # noqa: N818 (no error)
    """The compiled model was called: both graphs are lowered by then."""


def calls(model_name: str, layers: int) -> dict:
    """Return how often the code of each pass calls each function, and operators without a rule.

    Nothing is run, or compiled by C++.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config, graph
    from torch._subclasses.fake_tensor import FakeTensorMode

    from model import build, kernels

    result = {"without": []}
    make_fallback = graph.make_fallback

    def record_fallback(operator, *args, **keys):
        result["without"].append(str(operator))
        return make_fallback(operator, *args, **keys)

    def stop(_):
        raise Lowered

    def count_calls(lowering):
        """Count the calls in the generated code instead of loading it."""
        code = lowering.codegen()[0].value
        counts = collections.Counter(CALL.findall(code[code.index("def call(") :]))
        result["backward" if lowering.is_backward else "forward"] = counts
        lowering.cache_key = ""
        lowering.cache_path = ""
        lowering.cache_linemap = []
        module = types.ModuleType("lowered")
        module.__file__ = ""
        module.call = stop
        return module

    graph.make_fallback = record_fallback
    graph.GraphLowering.compile_to_module = count_calls
    functorch.force_non_lazy_backward_lowering = True
    config.fx_graph_cache = False
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(model_name, **{**TINY, "num_hidden_layers": layers})
        kernels.use(model, "on", "cuda")
        ids = torch.zeros(2, 16, dtype=torch.int64)
        with contextlib.suppress(Lowered):
            torch.compile(model, fullgraph=True)(ids, ids)
    return result


def main(tasks: dict) -> dict:
    """Run each task, a function with its arguments, in a process of its own, one after the other."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return {name: pool.apply(globals()[task], args) for name, (task, *args) in tasks.items()}


if __name__ == "__main__":
    results = main({"imports": ["imports"]})
    import torch._inductor.lowering  # once for all that follow, for its seconds

    torch.__version__ = TorchVersion("2.11.0")
    print(json.dumps({**results, **main(json.loads(sys.argv[1]))}))
