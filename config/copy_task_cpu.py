"""The copy task on two CPU cores.

    python data/copy_task/prepare.py
    python train.py config/copy_task_cpu.py

The model learns the task in about a minute. Its loss is then close to ln(16) / 2, the lowest
possible value.
"""

from utils import machine as _machine

model = "DDL-gpt-mha-rope"
dataset = "copy_task"
device = "cpu"
num_hidden_layers = 2
num_attention_heads = 4
head_dim = 32
hidden_size = 128

max_steps = 200
global_batch_size = 64
micro_batch_size = 64
optimizer = "muon"
learning_rate = 1e-2
warmup_steps = 50
eval_interval = 50
eval_batches = 4
checkpoint_interval = 200

# Use bfloat16 if the CPU has instructions for it, and torch.compile if there are a C++ compiler and
# Python's header files.
dtype = "bfloat16" if _machine.cpu_has_bfloat16() else "float32"
compile = _machine.can_compile()
