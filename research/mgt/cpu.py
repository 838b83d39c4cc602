"""The MGT paper's copy task, small enough for one CPU core; experiments.py overrides some keys.

The five experiments on text are in small.py at a size for a CPU, and study.py trains them.
"""

model = "MGT-gpt-mha"
dataset = "python_stdlib"
device = "cpu"
dtype = "float32"
compile = False  # compiling 100 blocks takes longer than these runs
block_size = 64
num_attention_heads = 4
head_dim = 8
hidden_size = 32
init = "normal"  # the default when the stored runs were trained

max_steps = 100
global_batch_size = 4
micro_batch_size = 4
learning_rate = 1e-3
warmup_steps = 10

# One evaluation, the last, over the same 64 sequences in every run.
eval_interval = 100_000
eval_batches = 16
eval_full = False
log_interval = 50
