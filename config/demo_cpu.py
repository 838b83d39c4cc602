"""A small Deep Delta Learning model on the standard library's source: a few minutes on two CPU cores."""

import shutil as _shutil
import sysconfig as _sysconfig
from pathlib import Path as _Path

import torch as _torch

model = "DDL-gpt-mha-rope"
dataset = "python_stdlib"
device = "cpu"
vocab_size = 4096
block_size = 256
num_hidden_layers = 4
num_attention_heads = 4
head_dim = 32
hidden_size = 128

# Small batches: with so few tokens, more steps beat less noise. Muon learns about twice as fast as AdamW here.
max_steps = 800
global_batch_size = 8
micro_batch_size = 8
optimizer = "muon"
learning_rate = 2e-2
warmup_steps = 50

eval_interval = 100
eval_batches = 8
log_interval = 20
checkpoint_interval = 200

_capabilities = getattr(_torch.cpu, "get_capabilities", dict)()
# bfloat16 where the CPU multiplies it in hardware; compiled where there are a C++ compiler and Python's headers.
dtype = "bfloat16" if _capabilities.get("avx512_bf16") else "float32"
compile = bool(_shutil.which("g++")) and (_Path(_sysconfig.get_path("include")) / "Python.h").exists()
