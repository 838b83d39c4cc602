"""One CUDA graph of all forward and backward passes of a step (`cuda_graphs=step`).

With cuda_graphs=on, torch.compile replays two graphs for each micro-batch, and the host launches what
lies between them: the sums of gradients over micro-batches, their norm, and clipping. Here all of it is
one graph, which the host launches at once, on several GPUs with DDP's all-reduce of the gradients. It has
not run on a GPU yet.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from training.batches import MicroBatch

# Compiling, and what libraries do at their first call, must not be captured. DDP times its first ten
# steps, for which the host waits.
NUM_WARMUP_STEPS = 11

Compute = Callable[[list[MicroBatch]], tuple[torch.Tensor, torch.Tensor]]


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """Return the stream on which the steps of this process are captured."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def on_capture_stream() -> Iterator[None]:
    """Launch what is inside on the capture stream, after what was launched before on the current one.

    Autograd adds gradients on the stream on which the forward pass ran, or DDP was built.
    """
    current_stream = torch.cuda.current_stream()
    capture_stream().wait_stream(current_stream)
    with torch.cuda.stream(capture_stream()):
        yield
    current_stream.wait_stream(capture_stream())


class StepGraph:
    """Captures the gradients of a step at the first call, and replays them at each call.

    It must be deleted before the process group: NCCL waits for the end of graphs that call it.

    Args:
        model: its parameters get gradients in the memory of the graph
        compute_gradients: as in train.py, of a run
    """

    def __init__(self, model: nn.Module, compute_gradients: Compute):
        self.model = model
        self.compute_gradients = compute_gradients
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batches: Iterable[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as `compute_gradients`, in memory that the next call overwrites."""
        batches = list(batches)
        if self.graph is None:
            self.capture(batches)
        for captured_batch, batch in zip(self.batches, batches, strict=True):
            for captured, tensor in zip(captured_batch, batch):
                if tensor is not None:
                    captured.copy_(tensor)
        self.graph.replay()
        # `zero_grad` has taken them away
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.results

    def capture(self, batches: list[MicroBatch]) -> None:
        """Capture the graph for micro-batches of these shapes, after steps that do not count."""
        self.batches = [
            MicroBatch(*(tensor if tensor is None else tensor.clone() for tensor in batch))
            for batch in batches
        ]
        with on_capture_stream():
            for _ in range(NUM_WARMUP_STEPS):
                self.compute_gradients(self.batches)
                # without gradients, so that the graph writes the first ones instead of adding them
                self.model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # the thread that prepares batches pins memory, which is no part of the graph
        with torch.cuda.graph(graph, stream=capture_stream(), capture_error_mode="thread_local"):
            self.results = self.compute_gradients(self.batches)
        self.gradients = [
            (parameter, parameter.grad)
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]
        self.graph = graph
