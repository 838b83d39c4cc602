"""The language model of the study of residual streams, which one CPU core trains in about 80 seconds.

    python research/residual_streams/python_packages.py
    python train.py research/residual_streams/cpu.py

It has the depth and width of config/demo_cpu.py, but shorter sequences and fewer tokens per step. A
pilot run determined these sizes. With so few tokens, small batches are better: more steps matter
more than less gradient noise. Muon learns about twice as fast as AdamW here.
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
# Evaluate 512 sequences. The entire validation split would take longer than the training.
eval_batches = 64
eval_full = False
log_interval = 100
checkpoint_interval = 400

# Use bfloat16 if the CPU has instructions for it, and torch.compile if there are a C++ compiler and
# Python's header files.
dtype = "bfloat16" if _machine.cpu_has_bfloat16() else "float32"
compile = _machine.can_compile()
