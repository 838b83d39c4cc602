"""One model's training step lowered by Inductor for a GPU that is not there: `python -m benchmarks.lowered JSON`.

A process of its own (see absent_gpu.py) that `bench.py lowering` starts; prints JSON: seconds, and every launch of the
forward and the backward graph with its bytes and, for matrix products and attention, its floating-point operations.
"""

import json
import math
import sys
import time
import types

import torch
import torch.nn.functional as F

from benchmarks import absent_gpu

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
# Arguments of our operators of which less than all is read: what carries a gradient alone, and values beside the
# queries and keys.
READ = {"residual_step": {"state": 0}, "rope_norm": {"qkv": 2 / 3}, "rope_norm_backward": {"qkv": 2 / 3}}


class Stop(Exception):  # noqa: N818 (no error)
    """The compiled step was called: everything is lowered by then, and nothing can run."""


def flash_attention(q, k, v, attn_mask=None, is_causal=False):
    """What scaled_dot_product_attention comes to on the device, which it would ask first."""
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def lowered(setting: dict) -> dict:
    """{seconds, cpu_seconds, parameters, forward, backward}.

    setting: stem, size (keys of the model), rows (sequences), kernels (as train.py's key).
    """
    from torch._functorch import config as functorch
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    from model import build, kernels

    found = {}

    def kept(graph):
        """In the place of loading the code: note what it launches."""
        graph.codegen()
        found["backward" if graph.is_backward else "forward"] = launches(graph)
        graph.cache_key, graph.cache_path, graph.cache_linemap = "", "", []
        module = types.ModuleType("lowered")
        module.__file__, module.call = "", stop
        return module

    def stop(_):
        raise Stop

    GraphLowering.compile_to_module = kept
    functorch.force_non_lazy_backward_lowering = True
    F.scaled_dot_product_attention = flash_attention
    for name in ("uniform_", "normal_"):  # there is nothing to fill
        setattr(torch.Tensor, name, lambda tensor, *args, **keys: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda:0"):
            model = build(setting["stem"], **setting["size"])
        if why := kernels.use(model, setting["kernels"], "cuda"):
            assert setting["kernels"] == "off", why
        ids = torch.zeros(setting["rows"], setting["size"]["block_size"], dtype=torch.int64, device="cuda:0")
        start, used = time.perf_counter(), time.process_time()
        try:
            with torch.autocast("cuda", torch.bfloat16):
                torch.compile(model, fullgraph=True)(ids, ids)
        except Stop:
            pass
    parameters = sum(p.numel() for p in model.parameters())
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - used}
    return {**seconds, "parameters": parameters, **found}


def launches(graph) -> list[dict]:
    """What the graph starts on the device, in its order."""
    from torch._inductor import ir, scheduler
    from torch._inductor.virtualized import V

    found = []
    with V.set_graph_handler(graph):
        for node in graph.scheduler.nodes:
            if isinstance(node, scheduler.NopKernelSchedulerNode):
                continue
            if not node.is_extern():
                names = [part.node.get_name() for part in node.get_nodes() if part.node is not None]
                found.append(launch("inductor", names[-1], node.get_read_write_buffers_sizes()))
            elif not isinstance(node.node, ir.MultiOutput):
                found.append(extern(node))
    return found


def launch(kind: str, name: str, size: int, flops: int = 0, case: dict | None = None) -> dict:
    return {"kind": kind, "name": name, "bytes": int(size), "flops": int(flops)} | ({"case": case} if case else {})


def extern(node) -> dict:
    """A matrix product, attention or an operator of ours."""
    operator = getattr(node.node, "op_overload", None)
    name = operator._schema.name.partition("::")[2] if operator is not None else node.node.get_kernel_name()
    if name in PRODUCTS:
        a, b = (part.get_size() for part in node.node.inputs[-2:])
        flops = 2 * math.prod(map(int, a)) * int(b[-1])
        return launch("product", "x".join(map(str, (*a, b[-1]))), node.get_read_write_buffers_sizes(), flops)
    # Its own call is the last of those that it may come from.
    traced = max((origin for origin in node.node.get_origins() if origin.target is operator), default=None)
    if traced is None:
        return launch("other", name, node.get_read_write_buffers_sizes())
    arguments = {a.name: value for a, value in zip(operator._schema.arguments, values(traced.args))}
    results = traced.meta["val"]
    if "attention" in name:
        batch, heads, tokens, width = arguments["query"].shape
        # Half of the products of queries with keys and of weights with values; backward has five products for two.
        flops = 4 * batch * heads * tokens**2 * width / 2 * (2.5 if "backward" in name else 1)
        return launch("attention", name, touched(list(arguments.values())) + touched(results), flops)
    if operator.namespace != "ddl":
        return launch("other", name, node.get_read_write_buffers_sizes())
    shares = READ.get(name, {})
    whole = [value for key, value in arguments.items() if key not in shares]
    size = touched(whole) + touched(results) + sum(share * touched(arguments[key]) for key, share in shares.items())
    return launch("operator", name, size, case=case_of(name, arguments))


def values(arguments):
    return torch.fx.node.map_arg(arguments, lambda node: node.meta["val"])


def touched(tensors) -> int:
    """Bytes of all that the tensors see: dimensions of stride 0 are seen once."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(tensors) if isinstance(t, torch.Tensor)]
    unique = {(t.untyped_storage()._cdata, t.storage_offset(), t.shape): t for t in tensors}
    return sum(
        t.itemsize * math.prod(size for size, stride in zip(t.shape, t.stride()) if stride) * bool(t.numel())
        for t in unique.values()
    )


def case_of(name: str, arguments: dict) -> dict:
    """The operator's kernel as `bench.py ceiling` names it."""
    kernel, _, way = name.partition("_backward")
    way = "backward" if name.endswith("_backward") else "forward"
    case = {"kernel": f"{kernel.removeprefix('residual_')} {way}"}
    if "read" in arguments:
        tokens_of_read, columns, d = arguments["read"].shape
        case |= {"d": d, "columns": columns, "tokens_of_read": tokens_of_read}
        case |= {"writes_replayed": len(arguments["hs"])}
        case |= {"stored": arguments["store"]} if "store" in arguments else {}
    elif "weights" in arguments:
        case |= {"d": arguments["weights"].shape[2], "columns": arguments["weights"].shape[1]}
    elif "qkv" in arguments:
        case |= {"d": math.prod(arguments["qkv"].shape[3:])}
    elif "norm" in arguments:
        case |= {"d": len(arguments["norm"])}
    return case


if __name__ == "__main__":
    absent_gpu.pretend()
    print(json.dumps(lowered(json.loads(sys.argv[1]))))
