"""A small Deep Delta Learning model on the standard library's source: a few minutes on two CPU
cores.
"""

from utils import machine as _machine

model = "DDL-gpt-mha-rope"
dataset = "python_stdlib"
device = "cpu"
block_size = 256
num_hidden_layers = 4
num_attention_heads = 4
head_dim = 32
hidden_size = 128
init = "normal"  # the better one for this model, by little (research/docs/demo.md)

# Small batches: with so few tokens, more steps beat less noise. Muon learns about twice as fast as
# AdamW here. The rates are this model's best (research/docs/demo.md); another has its own, additive
# 1e-2 (Muon) and 8e-2.
max_steps = 800
global_batch_size = 8
micro_batch_size = 8
optimizer = "muon"
learning_rate = 2e-2
muon_learning_rate = 4e-2
warmup_steps = 50

eval_interval = 100
eval_batches = 8
log_interval = 20
checkpoint_interval = 200

# bfloat16 where the CPU multiplies it in hardware; compiled where there are a compiler and Python
# headers.
dtype = "bfloat16" if _machine.cpu_has_bfloat16() else "float32"
compile = _machine.can_compile()
