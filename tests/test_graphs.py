"""CUDA graphs of whole steps, on a CPU: a recording of all operations stands for the graph."""

import contextlib
import functools
import weakref

import pytest
import torch
from helpers import small_run
from in_process import train_in_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_runs import read_final_tensors, read_records

from training import graphs, setup
from utils import processes

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


@pytest.mark.parametrize(
    ("model", "num_processes"), [("gpt-mha-rope", 1), ("DDL-gpt-mha-rope-CC-EC", 2)]
)
def test_a_captured_step_changes_no_bits(
    corpus, tmp_path, monkeypatch, recordings, model, num_processes
):
    """With two micro-batches a step, whose gradients DDP averages after the last one."""
    stop = processes.stop

    def stop_after_the_graph(world, num_recordings):
        assert len(recordings) == num_recordings
        # destroying the process group would wait for them
        assert all(recording() is None for recording in recordings)
        stop(world)

    for setting, num_recordings in (("step", 1), ("off", 0)):
        check_and_stop = functools.partial(stop_after_the_graph, num_recordings=num_recordings)
        monkeypatch.setattr(processes, "stop", check_and_stop)
        arguments = small_run(
            corpus,
            tmp_path / setting,
            model=model,
            cuda_graphs=setting,
            global_batch_size=4 * num_processes,
            micro_batch_size=2,
            grad_clip=0.1,
            max_steps=4,
        )
        train_in_processes(num_processes, arguments, tmp_path / f"log_{setting}")
    captured, plain = (tmp_path / setting for setting in ("step", "off"))
    assert read_final_tensors(captured) == read_final_tensors(plain)
    assert read_records(captured)[1:] == read_records(plain)[1:]
