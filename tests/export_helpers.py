"""What tests of export and others share."""

from pathlib import Path

import torch
from in_process import call

from data import tokenizer
from model import build
from training import checkpoint

TINY = {"vocab_size": 260, "block_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"head_dim": 8, "hidden_size": 12}
CC = "DDL-gpt-mha-rope-CC"


def noisy(stem, keys):
    """A model off its start, so that the likeliest token is not the one before."""
    made = build(stem, **{**TINY, **keys})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.eval()


def save_run(folder: Path, made, stem: str, encoding=None) -> Path:
    """A run folder with one checkpoint at step 7."""
    run = {"dataset": "/some/where/stories", "global_batch_size": 4}
    run |= {"learning_rate": 0.01, "min_lr": None}
    state = {"step": 7, "seconds": 12.0, "model": stem, "model_config": vars(made.config)}
    state |= {"run_config": run, "corpus": {}}
    described = tokenizer.to_json(encoding or tokenizer.byte_tokenizer())
    checkpoint.save(
        folder, checkpoint.get_model_tensors(made), {"a:m": torch.ones(1)}, state, described
    )
    return folder


def exported(run: Path, out: Path, *arguments) -> Path:
    result = call("export.py", run, out, *arguments)
    assert result.returncode == 0, result.stderr.decode()
    return out
