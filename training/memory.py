"""What a training step keeps in memory, found without doing it: the model runs on fake tensors, which have no data.

Eager: every tensor that is made is counted until it is gone. Compiled: forward and backward pass are traced and divided
as torch.compile divides them, and its fusion is imitated: what operations between two matrix products make is not
stored, unless a later kernel or the backward pass needs it.
"""

import dataclasses
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import build, kernels
from training.distributed import KEPT_BLOCK

# What a process takes over what its tensors do, on a CPU: freed memory does not fit later tensors exactly, least where
# blocks are computed again (results/memory_cpu.json).
WASTE, WASTE_AGAIN = 1.25, 1.8


@dataclasses.dataclass(frozen=True)
class Setting:
    """All that the activations of one process depend on; rows: sequences of its micro-batch."""

    stem: str
    model_config: object
    rows: int
    device: torch.device
    bf16: bool = False
    compiled: bool = False
    checkpointing: bool = False
    kernels: str = "auto"
    state_interval: int = 2

    def model(self, layers: int):
        """The model with so many blocks, of fake tensors. To be called under FakeTensorMode."""
        with torch.device(self.device):
            model = build(self.stem, **{**dataclasses.asdict(self.model_config), "num_hidden_layers": layers})
        kernels.use(model, self.kernels, self.device, self.state_interval)
        return model

    def ids(self):
        return torch.zeros(self.rows, self.model_config.block_size, dtype=torch.int64, device=self.device)

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


class Unknown(Exception):  # noqa: N818 (says what it is)
    """The model cannot be run on tensors without data; the message says why."""


def needs(setting: Setting) -> tuple[int, int]:
    """(most bytes at once that a forward and backward pass needs beyond weights, nodes of the compiled graphs).

    The bytes are activations and the gradients as they are made. Deep models are extrapolated from two and four
    blocks, which are taken to be alike. Unknown: a model that looks at the values of its tensors, for example.
    ValueError: a model that cannot be made.
    """
    try:
        return peak_and_nodes(setting)
    except ValueError:
        raise
    except Exception as error:  # torch raises many kinds; such a model can be trained all the same
        raise Unknown(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}") from error


def peak_and_nodes(setting: Setting) -> tuple[int, int]:
    layers = setting.model_config.num_hidden_layers
    if not setting.compiled:
        return extrapolated(lambda n: eager_peak(setting, n, setting.checkpointing), layers), 0
    steps = {n: compiled_step(setting, n) for n in ((2, 4) if layers > 4 else (1, layers))}
    whole = extrapolated(lambda n: steps[n][0], layers)
    if setting.checkpointing and layers > 1:
        # Instead of all blocks, the states between them and one block that is computed again.
        few, *_, more = sorted(steps)
        block = (steps[more][0] - steps[few][0]) // (more - few)
        state = eager_peak(setting, 2, True) - eager_peak(setting, 1, True)
        whole -= (layers - 1) * max(block - state, 0)
    return whole, extrapolated(lambda n: steps[n][1], layers)


def extrapolated(peak, layers: int) -> int:
    """peak(layers), exact for up to four blocks, along the line through two and four of them for more."""
    if layers <= 4:
        return peak(layers)
    two, four = peak(2), peak(4)
    return two + (layers - 2) * (four - two) // 2


class Meter:
    """The most bytes in use. On a CPU the C library keeps freed blocks up to a size (`distributed.keep_freed_memory`)
    for later ones, but larger ones do not use them: there, the most of each kind add up."""

    def __init__(self, device: torch.device, waste: float):
        self.border, self.waste = (KEPT_BLOCK, waste) if device.type == "cpu" else (0, 1.0)
        self.now, self.most = [0, 0], [0, 0]  # of blocks up to the border, and larger ones

    def add(self, size: int) -> None:
        """size: bytes of a block that is there from now on; negative: one that is gone."""
        kind = int(abs(size) > self.border)
        self.now[kind] += size
        self.most[kind] = max(self.most[kind], self.now[kind])

    @property
    def peak(self) -> int:
        return int(self.waste * self.most[0]) + self.most[1]


class Living(TorchDispatchMode):
    """Measures the storages that operations make, from then until nobody holds them."""

    def __init__(self, meter: Meter):
        super().__init__()
        self.meter = meter
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return

        def gone(_):
            self.meter.add(-size)
            del self.storages[key]

        self.storages[key] = weakref.ref(storage, gone)
        self.meter.add(size)


def eager_peak(setting: Setting, layers: int, checkpointing: bool) -> int:
    """Most bytes alive during a forward and backward pass of a model of so many blocks."""
    with FakeTensorMode():
        model, ids = setting.model(layers), setting.ids()
        model.activation_checkpointing = checkpointing
        known = [tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), ids)]
        living = Living(Meter(setting.device, WASTE_AGAIN if checkpointing else WASTE))
        living.storages.update(dict.fromkeys(known))  # views of weights are no new bytes
        with living:
            with setting.autocast():
                _, loss = model(ids, ids)
            loss.backward()
    return living.meter.peak


# ---- compiled ----


def compiled_step(setting: Setting, layers: int) -> tuple[int, int]:
    """(most bytes alive during the forward and the backward graph, nodes of both) of a model of so many blocks."""
    forward, backward = graphs(setting, layers)
    outputs = forward.graph.find_nodes(op="output")[0].all_input_nodes
    names = {node.name for node in outputs if node.op != "placeholder"}
    saved = [node for node in backward.graph.find_nodes(op="placeholder") if node.name in names]
    meter = Meter(setting.device, WASTE)
    run_through(forward.graph, [], meter)
    meter.now = [0, 0]
    run_through(backward.graph, saved, meter)
    return meter.peak, len(forward.graph.nodes) + len(backward.graph.nodes)


def graphs(setting: Setting, layers: int):
    """(forward, backward) graph modules as torch.compile's default backend divides them."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found = []

    def partition(*args, **keys):
        found.extend(min_cut_rematerialization_partition(*args, **{**keys, "compiler": "inductor"}))
        return tuple(found)

    class Loss(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids, targets):
            return (self.model(ids, targets)[1],)

    def keep(graph, _):
        return graph

    with FakeTensorMode(), setting.autocast():
        arguments = {"partition_fn": partition, "decompositions": select_decomp_table()}
        loss, ids = Loss(setting.model(layers)), setting.ids()
        aot_module_simplified(loss, (ids, ids), fw_compiler=keep, bw_compiler=keep, **arguments)
    return found


def run_through(graph, held: list, meter: Meter) -> None:
    """Tell the meter what is stored when the graph runs in its order; `held` are inputs that it may free."""
    nodes = list(graph.nodes)
    stored = {node for node in nodes if node in held or is_stored(node)}
    reads: dict = {}  # of each node, the stored ones that it reads, also through what is fused with it
    last: dict = {}
    for node in nodes:
        reads[node] = {n for source in node.all_input_nodes for n in ({source} if source in stored else reads[source])}
        if node in stored or node.op == "output":
            last.update(dict.fromkeys(reads[node], node))
    gone: dict = {}
    for node in stored:
        gone.setdefault(last.get(node, node), []).append(-size_of(node))
    for node in held:
        meter.add(size_of(node))
    for node in nodes:
        made = [size_of(node)] if node in stored and node not in held else []
        # A fused kernel may write over what it is the last to read; a matrix product may not.
        for size in made + gone.get(node, []) if is_extern(node) else gone.get(node, []) + made:
            meter.add(size)


def size_of(node) -> int:
    """Bytes of a node's tensor, 0 for what is none."""
    value = node.meta.get("val")
    return value.numel() * value.itemsize if isinstance(value, torch.Tensor) else 0


MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
SCATTERS = {"embedding_dense_backward", "index_put", "scatter_add"}


def is_extern(node) -> bool:
    """Whether the node is a kernel of its own, which reads and writes whole tensors, and is fused with nothing."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace, _, name = node.target._schema.name.partition("::")
    return namespace not in ("aten", "prims") or name in MATRIX_PRODUCTS | SCATTERS or "attention" in name


def is_view(node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def is_part(node) -> bool:
    """Whether the node is one of several results of an operation."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def is_stored(node) -> bool:
    """Whether the node's tensor is in memory of its own: what kernels of their own read and make, and what is left."""
    if node.op != "call_function" or is_view(node):
        return False
    if is_extern(node) or (is_part(node) and is_extern(node.args[0])):
        return True
    users = list(node.users)
    while users:
        user = users.pop()
        if user.op == "output" or is_extern(user):
            return True
        if is_view(user):
            users += user.users
    return False
