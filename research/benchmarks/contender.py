"""A model that takes its turn in a measurement, and the memory it needs."""

import torch


class Contender:
    """A row of the table: a model on its device, an optimizer, and how the forward pass is called.

    `batch()` gives ids and targets, (B, T) each. `partner` is another contender whose model and optimizer this one
    shares, to run them compiled too.
    """

    def __init__(self, name, model, batch, device, dtype, compiled, partner=None):
        self.name, self.batch, self.device, self.dtype, self.compiled = (
            name,
            batch,
            device,
            dtype,
            compiled,
        )
        self.model = partner.model if partner else model.to(device)
        self.adamw = partner.adamw if partner else adamw_of(self.model)
        self.call = torch.compile(self.model, fullgraph=True) if compiled else self.model

    def loss(self):
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.call(*self.batch())[1]

    def train(self) -> None:
        self.loss().backward()
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.loss()


def adamw_of(model):
    return torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def saved_bytes(contender: Contender) -> int:
    """Bytes that a forward pass keeps for its backward pass, parameters aside: each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in contender.model.parameters()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = contender.loss()
    del loss
    return sum(storages.values())


def peak_bytes(contender: Contender) -> int:
    """Most bytes that a forward and backward pass adds on the GPU to weights, gradients and the optimizer's state.

    The gradients are there before, as in every but the first micro-step of an accumulated batch. Not run by the
    test-suite, which has no GPU.
    """
    contender.loss().backward()
    torch.cuda.synchronize(contender.device)
    before = torch.cuda.memory_allocated(contender.device)
    torch.cuda.reset_peak_memory_stats(contender.device)
    contender.loss().backward()
    torch.cuda.synchronize(contender.device)
    contender.adamw.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(contender.device) - before


def memory(contender: Contender, tokens: int) -> dict:
    """Bytes of activations per token, and on a GPU the peak with weights, gradients and AdamW's state of this model."""
    if contender.device.type != "cuda":
        return {"activation_bytes_per_token": saved_bytes(contender) / tokens}
    activations = peak_bytes(contender)
    state = (
        t
        for values in contender.adamw.state.values()
        for t in values.values()
        if torch.is_tensor(t)
    )
    resident = sum(t.nbytes for t in state) + 2 * sum(
        p.nbytes for p in contender.model.parameters()
    )
    return {
        "activation_bytes_per_token": activations / tokens,
        "peak_memory_bytes": activations + resident,
    }
