"""A model that takes its turn in a measurement, and the memory that it needs."""

from collections.abc import Callable

import torch


class Contender:
    """A row of the table: a model on its device, its optimizer, and its forward pass.

    Args:
        make_batch: returns ids (B, T) and targets (B, T)
        dtype: of autocast
        compiled: whether the forward pass is compiled
        cuda_graphs: whether compiled passes are replayed as CUDA graphs
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        make_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool,
        cuda_graphs: bool = False,
    ):
        self.name = name
        self.make_batch = make_batch
        self.device = device
        self.dtype = dtype
        self.compiled = compiled
        self.model = model.to(device)
        self.optimizer = make_optimizer(self.model)
        self.call = self.model
        if compiled:
            mode = "reduce-overhead" if cuda_graphs else None
            self.call = torch.compile(self.model, fullgraph=True, mode=mode)

    def compute_loss(self) -> torch.Tensor:
        """Return the loss of a batch, a scalar."""
        ids, targets = self.make_batch()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            _, loss = self.call(ids, targets)
        return loss

    def train(self) -> None:
        """Take a training step."""
        self.compute_loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self) -> None:
        """Do a forward pass without gradients."""
        with torch.no_grad():
            self.compute_loss()


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def measure_saved_bytes(contender: Contender) -> int:
    """Return the bytes that a forward pass saves for its backward pass, without parameters.

    Tensors that share a storage count once.
    """
    parameter_storages = {
        parameter.untyped_storage().data_ptr() for parameter in contender.model.parameters()
    }
    bytes_by_storage = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = contender.compute_loss()
    del loss  # the storages must stay alive until here, or their addresses could be used twice
    return sum(bytes_by_storage.values())


def measure_peak_bytes(contender: Contender) -> int:
    """Return the peak bytes that a forward and backward pass adds on the GPU.

    Weights, gradients and the optimizer's state do not count. The gradients exist before the pass, as
    in all but the first micro-step of an accumulated batch. The tests do not run this without a GPU.
    """
    contender.compute_loss().backward()
    torch.cuda.synchronize(contender.device)
    allocated_bytes = torch.cuda.memory_allocated(contender.device)
    torch.cuda.reset_peak_memory_stats(contender.device)
    contender.compute_loss().backward()
    torch.cuda.synchronize(contender.device)
    contender.optimizer.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(contender.device) - allocated_bytes


def measure_memory(contender: Contender, num_tokens: int) -> dict[str, float]:
    """Return the bytes of activations per token of a batch with num_tokens tokens.

    On a GPU the result also has the peak of this model alone, with its weights, gradients and
    optimizer state.
    """
    if contender.device.type != "cuda":
        return {"activation_bytes_per_token": measure_saved_bytes(contender) / num_tokens}
    activation_bytes = measure_peak_bytes(contender)
    resident_bytes = 0
    for state in contender.optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                resident_bytes += value.nbytes
    for parameter in contender.model.parameters():
        resident_bytes += 2 * parameter.nbytes  # the weight and its gradient
    return {
        "activation_bytes_per_token": activation_bytes / num_tokens,
        "peak_memory_bytes": activation_bytes + resident_bytes,
    }
