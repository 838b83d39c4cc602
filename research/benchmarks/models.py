"""The sizes and models that are measured, and a model that takes its turn in a measurement."""

from typing import Any

import torch

import configurator
from configurator import collect_options
from model import build, kernels, model_class
from training.config import TrainConfig

BASELINE = "gpt-mha-rope"
# of the models, and of a batch
SIZES = {
    "quick": {
        "vocab_size": 1024,
        "block_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 64,
        "hidden_size": 256,
    },
    "small": {
        "vocab_size": 50304,
        "block_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "head_dim": 128,
        "hidden_size": 768,
        "mup": True,
    },
    "medium": {
        "vocab_size": 50304,
        "block_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "head_dim": 128,
        "hidden_size": 1024,
        "mup": True,
    },
    "tiny": {
        "vocab_size": 64,
        "block_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 8,
        "hidden_size": 32,
    },
}
MICRO_BATCH_SIZES = {"quick": 8, "small": 16, "medium": 16, "tiny": 1}


def make_row_name(model: str) -> str:
    """Return the name of a model of `--models` in tables and files."""
    return model.replace("+", " ")


def build_model(model: str, size: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """Build a model of `--models` with seed 0.

    Settings follow its name: keys of its config, for example `+ddl_value_channels=2`, or of the
    kernels, `+kernels=off` and `+state_checkpoint_interval=4`.

    Raises:
        ValueError: there is no such model or key, or a value is wrong
    """
    model_name, *setting_texts = model.split("+")
    texts = {}
    for setting_text in setting_texts:
        key, _, value = setting_text.partition("=")
        texts[key] = value
    options = collect_options(model_class(model_name).Config, TrainConfig)
    configurator.check_names(texts, options, prefix=f"--models: {model}: +")
    settings = configurator.read_settings({}, texts, options)
    # as train.py's defaults
    kernel_mode = settings.pop("kernels", "auto")
    state_checkpoint_interval = settings.pop("state_checkpoint_interval", 2)
    torch.manual_seed(0)
    built = build(model_name, **size, **settings)
    kernels.use(built, kernel_mode, device, state_checkpoint_interval=state_checkpoint_interval)
    return built


class Contender:
    """A model on its device, its optimizer, and its forward pass.

    Args:
        batch: ids (B, T) and targets (B, T)
        dtype: of autocast
        compiled: whether the forward pass is compiled
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        batch: tuple[torch.Tensor, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool,
    ):
        self.name = name
        self.batch = batch
        self.device = device
        self.dtype = dtype
        self.compiled = compiled
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.call = torch.compile(self.model, fullgraph=True) if compiled else self.model

    def compute_loss(self) -> torch.Tensor:
        """Return the loss of a batch, a scalar."""
        ids, targets = self.batch
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            _, loss = self.call(ids, targets)
        return loss

    def train(self) -> None:
        """Take a training step."""
        self.compute_loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


# ---- memory ----


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


def measure_activations(contender: Contender, num_tokens: int) -> float:
    """Return the bytes of activations per token of a batch with num_tokens tokens."""
    measure = measure_peak_bytes if contender.device.type == "cuda" else measure_saved_bytes
    return measure(contender) / num_tokens
