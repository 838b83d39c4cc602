"""A comparison of streams on one GPU: 6 blocks of width 384, 212 million tokens of FineWeb-Edu.

    python data/fineweb_edu/prepare.py --max_tokens=1000000000
    python research/sweep.py config/compare_gpu.py --model=gpt-mha-rope,DDL-gpt-mha-rope-CC-EC

AdamW and Muon each have their own learning rate, and weight decay is set by a separate rate. The
rates are those of small models on a CPU. On an H200 with another corpus, 1e-2 was the best of three
rates of Muon, and the lowest (results/gpu/README.md), so try lower ones (sweep.py --tune).
"""

model = "gpt-mha-rope"
dataset = "fineweb_edu"
block_size = 1024
num_hidden_layers = 6
num_attention_heads = 6
head_dim = 64
hidden_size = 384

# 20 tokens for each of the 10.6 million parameters beside the embedding: 212 million
max_steps = 810
warmup_steps = 81
global_batch_size = 256
micro_batch_size = 32
optimizer = "muon"
muon_learning_rate = 2e-2
learning_rate = 4e-3
weight_decay_rate = 2e-2

eval_interval = 100_000  # the last step alone
eval_full = False
eval_batches = 128
eval_part = "second"
log_interval = 20
checkpoint_interval = 500
keep_last = 1
