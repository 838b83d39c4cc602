"""A small Deep Delta Learning model of Python code, which two CPU cores train in a few minutes.

`make train` runs these commands, and then generates text:

    python data/python_stdlib/prepare.py
    python train.py config/demo_cpu.py
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
init = "normal"  # the loss is lower here, but not clearly (research/docs/demo.md)

# With so few tokens, small batches are better: more steps matter more than less gradient noise.
# Muon learns about twice as fast as AdamW here. The learning rates are those of this model
# (research/docs/demo.md); the best ones for the additive model are learning_rate=4e-2 and
# muon_learning_rate=1e-2.
max_steps = 800
global_batch_size = 8
micro_batch_size = 8
optimizer = "muon"
learning_rate = 2e-2
muon_learning_rate = 8e-2
warmup_steps = 50

eval_interval = 100
eval_batches = 8
log_interval = 20
checkpoint_interval = 200

# Use bfloat16 if the CPU has instructions for it, and torch.compile if there are a C++ compiler and
# Python's header files. A run this short ends sooner with compiled blocks than with a compiled model.
dtype = "bfloat16" if _machine.cpu_has_bfloat16() else "float32"
compile = "blocks" if _machine.can_compile() else False
