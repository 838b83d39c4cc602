"""A recording of all operations, which stands on a CPU for the CUDA graph of a step."""

import contextlib
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training import graphs, setup

ATEN = torch.ops.aten
# During these the host waits for the device, which ends a capture with an error.
WAITING_OPERATIONS = {ATEN._local_scalar_dense, ATEN.equal, ATEN.nonzero, ATEN.masked_select}


class Recording(TorchDispatchMode):
    """Repeats operations on the same memory, and writes their results where the first ones were."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation.overloadpacket not in WAITING_OPERATIONS, operation
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for operation, args, kwargs, first_result in self.calls:
            leaves = tree_leaves(operation(*args, **kwargs))
            for first_leaf, leaf in zip(tree_leaves(first_result), leaves, strict=True):
                if isinstance(leaf, torch.Tensor):
                    first_leaf.copy_(leaf)
                elif hasattr(leaf, "wait"):  # the work of all-reduce
                    leaf.wait()


class Stream:
    """Stands for torch.cuda.Stream; a CPU launches everything in order."""

    def wait_stream(self, stream: "Stream") -> None:
        pass


@pytest.fixture
def recordings(monkeypatch) -> list[weakref.ref]:
    """Let runs on this CPU record their steps; returns a list of their recordings."""
    references = []

    def record(graph, *, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        references.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(setup, "choose_cuda_graphs", lambda config, device: config.cuda_graphs)
    monkeypatch.setattr(setup, "check_machine", lambda config, device: None)
    graphs.capture_stream.cache_clear()
    yield references
    graphs.capture_stream.cache_clear()
