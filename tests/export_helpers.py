"""Runs and releases of tiny models, for the tests that export or read them."""

import json
from pathlib import Path

import torch
from helpers import SMALL
from in_process import call
from safetensors.torch import save_file

from data import tokenizer
from model import build
from model.gpt import GPT
from training import checkpoint

TINY = {**SMALL, "block_size": 24}
CC = "DDL-gpt-mha-rope-CC"


def build_noisy(model_name: str, settings: dict) -> GPT:
    """Build a model with noisy weights, so that the most likely token is not the last one."""
    model = build(model_name, **{**TINY, **settings})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def save_run(
    folder: Path, model: GPT, model_name: str, encoding: tokenizer.Tokenizer | None = None
) -> Path:
    """Write a run folder with one checkpoint at step 7."""
    state = {
        "step": 7,
        "seconds": 12.0,
        "model": model_name,
        "model_config": vars(model.config),
        "run_config": {
            "dataset": "/some/where/stories",
            "global_batch_size": 4,
            "learning_rate": 0.01,
            "min_lr": None,
        },
        "corpus": {},
    }
    checkpoint.save(
        folder,
        {
            "model.safetensors": checkpoint.get_model_tensors(model),
            "optimizer.safetensors": {"a:m": torch.ones(1)},
        },
        state,
        (encoding or tokenizer.byte_tokenizer()).to_json(),
    )
    return folder


def released_weights(model: GPT) -> dict[str, torch.Tensor]:
    """Return a model's weights under the names and in the shapes of the authors' current release."""
    value_channels = getattr(model.config, "ddl_value_channels", 1)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("conv.weight"):
            name = name.replace(".shortconv.weight", ".weight").replace(".conv.weight", ".weight")
            tensor = tensor.unflatten(0, (-1, value_channels)).flatten(2)  # (d, v, K)
        tensors[name.replace("c_proj", "o_proj")] = tensor.clone()
    # A read over value channels that is one weight becomes a pair that folds into it: the vector
    # reads the middle channel of the convolution.
    for name, tensor in list(tensors.items()):
        if name.endswith(("compress.weight", "readout.weight")) and tensor.ndim == 2:
            middle = torch.eye(value_channels)[(value_channels - 1) // 2]
            tensors.setdefault(name.replace("weight", "read"), middle)
    return tensors


def save_released(model: GPT, folder: Path, **config) -> Path:
    """Write a model as a folder of the authors' current release."""
    folder.mkdir(parents=True)
    save_file(released_weights(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**vars(model.config), **config}))
    return folder


def export_run(run: Path, out: Path, *arguments) -> Path:
    """Export a run, and return the exported folder."""
    result = call("export.py", run, out, *arguments)
    assert result.returncode == 0, result.stderr.decode()
    return out
