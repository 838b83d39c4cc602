"""Run by test_lowering.py: for which operators Inductor has rules once kernels are in use, and what
it makes of a deep model.

All under a torch that says it is 2.11, and each in a process of its own, forked from this one,
which has imported torch alone: what registered a rule, or imported an operator, for one model has
not done so for the next. Prints JSON.
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

TINY = {"vocab_size": 64, "block_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"head_dim": 16, "hidden_size": 32}
CALL = re.compile(r"^ +(?:\w+ = )?(cpp_fused|extern_kernels\.\w+|torch\.ops\.[\w.]+)\w*\(", re.M)


def rules(setting: str, *stems: str) -> dict:
    """Of one model after the other: all our operators, and those of them without a rule."""
    from model import build, kernels

    for stem in stems:
        kernels.use(build(stem, **TINY), setting, "cuda")
    from torch._inductor.lowering import lowerings

    known = {str(operator) for operator in lowerings}
    ours = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ddl::")]
    operators = [name.removeprefix("ddl::") for name in ours]
    return {
        "operators": operators,
        "without": [name for name in operators if f"ddl.{name}.default" not in known],
    }


def imports() -> bool:
    """Whether `use` imports Inductor."""
    from model import build, kernels

    kernels.use(build("DDL-gpt-mha-rope", **TINY), "on", "cuda")
    return "torch._inductor.lowering" in sys.modules


class Lowered(Exception):  # noqa: N818 (no error)
    """The compiled model was called: both graphs are lowered by then."""


def calls(stem: str, layers: int) -> dict:
    """How often the code of each pass calls what, and operators that lacked a rule on the way.

    Nothing is run, or compiled by C++.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config, graph
    from torch._subclasses.fake_tensor import FakeTensorMode

    from model import build, kernels

    found, make_fallback = {"without": []}, graph.make_fallback

    def note(operator, *args, **keys):
        found["without"].append(str(operator))
        return make_fallback(operator, *args, **keys)

    def stop(_):
        raise Lowered

    def keep(lowering):
        """In the place of loading the code."""
        code = lowering.codegen()[0].value
        counts = collections.Counter(CALL.findall(code[code.index("def call(") :]))
        found["backward" if lowering.is_backward else "forward"] = counts
        lowering.cache_key, lowering.cache_path, lowering.cache_linemap = "", "", []
        module = types.ModuleType("lowered")
        module.__file__, module.call = "", stop
        return module

    graph.make_fallback, graph.GraphLowering.compile_to_module = note, keep
    functorch.force_non_lazy_backward_lowering = True
    config.fx_graph_cache = False
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(stem, **TINY | {"num_hidden_layers": layers})
        kernels.use(model, "on", "cuda")
        ids = torch.zeros(2, 16, dtype=torch.int64)
        with contextlib.suppress(Lowered):
            torch.compile(model, fullgraph=True)(ids, ids)
    return found


def main(tasks: dict) -> dict:
    """tasks: name -> function and its arguments. A process each, one after the other."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return {name: pool.apply(globals()[task], args) for name, (task, *args) in tasks.items()}


if __name__ == "__main__":
    made = main({"imports": ["imports"]})
    import torch._inductor.lowering  # once for all that follow, for its seconds

    torch.__version__ = TorchVersion("2.11.0")
    print(json.dumps(made | main(json.loads(sys.argv[1]))))
