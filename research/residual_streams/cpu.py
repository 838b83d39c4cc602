"""The study's language model for one CPU core: the demo's width and depth, shorter sequences, fewer tokens a step.

Sizes were fixed by a pilot, so that a run takes about 80 seconds. With so few tokens, more steps beat less noise, and
Muon learns about twice as fast as AdamW.
"""

from utils import machine as _machine

model = "gpt-mha-rope"
dataset = "python_packages"
device = "cpu"
vocab_size = 4096
block_size = 128
num_hidden_layers = 4
num_attention_heads = 4
head_dim = 32
hidden_size = 128

max_steps = 400
global_batch_size = 8
micro_batch_size = 8
optimizer = "muon"
learning_rate = 2e-2
warmup_steps = 40

eval_interval = 200
eval_batches = 64  # 512 sequences: the whole split would take longer than the training
eval_full = False
log_interval = 100
checkpoint_interval = 400
dtype = "bfloat16" if _machine.cpu_has_bfloat16() else "float32"
compile = _machine.can_compile()
