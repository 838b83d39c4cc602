"""Multi-query associative recall (data/recall/prepare.py, its defaults) on a CPU core; nothing is
compiled.
"""

model = "DDL-gpt-mha-rope"
dataset = "recall"
device = "cpu"
dtype = "float32"
compile = False
num_hidden_layers = 2
num_attention_heads = 2
head_dim = 32
hidden_size = 64

max_steps = 300
global_batch_size = 64
micro_batch_size = 64
optimizer = "muon"
learning_rate = 1e-2
warmup_steps = 30
eval_interval = 100
eval_batches = 4
log_interval = 50
checkpoint_interval = 300
