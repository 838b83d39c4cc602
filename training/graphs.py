"""One CUDA graph of all forward and backward passes of a step (`cuda_graphs=step`).

With cuda_graphs=on, torch.compile replays two graphs for each micro-batch, and the host launches what
lies between them: the sums of gradients over micro-batches, their norm, and clipping. Here all of it is
one graph, which the host launches at once. It has not run on a GPU yet.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from training.batches import MicroBatch

# Compiling, and what libraries do at their first call, must not be captured.
NUM_WARMUP_STEPS = 3

Compute = Callable[[list[MicroBatch], float], tuple[torch.Tensor, torch.Tensor]]


class StepGraph:
    """Captures the gradients of a step at the first call, and replays them at each call.

    Args:
        model: its parameters get gradients in the memory of the graph
        compute_gradients: as in train.py, of a run
    """

    def __init__(self, model: nn.Module, compute_gradients: Compute):
        self.model = model
        self.compute_gradients = compute_gradients
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self, batches: Iterable[MicroBatch], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as `compute_gradients`, in memory that the next call overwrites.

        scale: the same at each call
        """
        batches = list(batches)
        if self.graph is None:
            self.capture(batches, scale)
        for captured_batch, batch in zip(self.batches, batches, strict=True):
            for captured, tensor in zip(captured_batch, batch):
                if tensor is not None:
                    captured.copy_(tensor)
        self.graph.replay()
        # `zero_grad` has taken them away
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.results

    def capture(self, batches: list[MicroBatch], scale: float) -> None:
        """Capture the graph for micro-batches of these shapes, after steps that do not count."""
        self.batches = [
            MicroBatch(*(tensor if tensor is None else tensor.clone() for tensor in batch))
            for batch in batches
        ]
        # autograd adds gradients on the stream on which the forward pass ran
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARMUP_STEPS):
                self.compute_gradients(self.batches, scale)
                # without gradients, so that the graph allocates them, and writes the first ones
                # instead of adding them
                self.model.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # the thread that prepares batches pins memory, which is no part of the graph
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.results = self.compute_gradients(self.batches, scale)
        self.gradients = [
            (parameter, parameter.grad)
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]
        self.graph = graph
