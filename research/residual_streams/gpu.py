"""The study's language model for a GPU: 20 million parameters beside those of its vocabulary, 39 million tokens a run.

AdamW as in the paper; its recipe's rates are for a model six times as large, so every arm chooses its own.
"""

model = "gpt-mha-rope"
dataset = "python_packages_16k"
device = "cuda"
vocab_size = 16384
block_size = 512
num_hidden_layers = 8
num_attention_heads = 6
head_dim = 64
hidden_size = 384

max_steps = 1200
global_batch_size = 64
micro_batch_size = 64
learning_rate = 2e-3
warmup_steps = 100

eval_interval = 200
eval_batches = 16  # 1,024 sequences
eval_full = False
log_interval = 20
checkpoint_interval = 1200
