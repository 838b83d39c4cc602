"""The copy task (data/copy_task/prepare.py, its defaults) on two CPU cores: learned in a minute,
loss ln(16) / 2.
"""

from utils import machine as _machine

model = "DDL-gpt-mha-rope"
dataset = "copy_task"
device = "cpu"
vocab_size = 257
block_size = 64
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

dtype = "bfloat16" if _machine.cpu_has_bfloat16() else "float32"
compile = _machine.can_compile()
