"""What tests of export and others share."""

import json
from pathlib import Path

import torch
from in_process import call
from safetensors.torch import save_file

from data import tokenizer
from model import build
from training import checkpoint

TINY = {
    "vocab_size": 260,
    "block_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "hidden_size": 12,
}
CC = "DDL-gpt-mha-rope-CC"


def build_noisy(stem, keys):
    """Return a model with noisy weights, so that the most likely token is not the last one."""
    # a sequence of random numbers that goes on with the noise
    model = build(stem, **{**TINY, "init_order": "sequential", **keys})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def save_run(folder: Path, model, stem: str, encoding=None) -> Path:
    """Write a run folder with one checkpoint at step 7."""
    state = {
        "step": 7,
        "seconds": 12.0,
        "model": stem,
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
        checkpoint.get_model_tensors(model),
        {"a:m": torch.ones(1)},
        state,
        tokenizer.to_json(encoding or tokenizer.byte_tokenizer()),
    )
    return folder


def released_weights(model) -> dict[str, torch.Tensor]:
    """Return a model's weights under the names and in the shapes of the authors' current release."""
    columns = getattr(model.config, "ddl_value_channels", 1)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("conv.weight"):
            name = name.replace(".shortconv.weight", ".weight").replace(".conv.weight", ".weight")
            tensor = tensor.unflatten(0, (-1, columns)).flatten(2)  # (d, v, K)
        tensors[name.replace("c_proj", "o_proj")] = tensor.clone()
    # A read over columns that is one weight becomes a pair that folds into it: the vector reads the
    # middle column of the convolution.
    for name, tensor in list(tensors.items()):
        if name.endswith(("compress.weight", "readout.weight")) and tensor.ndim == 2:
            middle = torch.eye(columns)[(columns - 1) // 2]
            tensors.setdefault(name.replace("weight", "read"), middle)
    return tensors


def save_released(model, folder: Path, **config) -> Path:
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
