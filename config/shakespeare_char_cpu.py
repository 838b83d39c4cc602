"""nanoGPT's character-level Shakespeare example for a CPU (nanoGPT's validation loss: 1.88).

    python data/shakespeare_char/prepare.py
    python train.py config/shakespeare_char_cpu.py

Add --model=NAME to train another residual stream.
"""

model = "gpt-mha-rope"
dataset = "shakespeare_char"
device = "cpu"
compile = False
block_size = 64
num_hidden_layers = 4
num_attention_heads = 4
head_dim = 32
hidden_size = 128

max_steps = 2000
global_batch_size = 12
micro_batch_size = 12
learning_rate = 1e-3
min_lr = 1e-4
warmup_steps = 100
beta2 = 0.99

eval_interval = 500
eval_batches = 20
log_interval = 100
checkpoint_interval = 1000
