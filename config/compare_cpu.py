"""A comparison of streams on one CPU core: the demo's depth and width, on its corpus.

    python data/python_stdlib/prepare.py
    python research/sweep.py config/compare_cpu.py --model=gpt-mha-rope,DDL-gpt-mha-rope --seed=0..4

One core trains 0.8 million tokens in two to four minutes. The results in
research/studies/residual_streams/README.md are of another corpus, the standard library with its
tests (commit a46b4293). Sequences and batches are shorter than the
demo's, because with so few tokens more steps matter more than less gradient noise.
"""

model = "gpt-mha-rope"
dataset = "python_stdlib"
device = "cpu"
vocab_size = 4096
block_size = 128
num_hidden_layers = 4
num_attention_heads = 4
head_dim = 32
hidden_size = 128

max_steps = 800
warmup_steps = 80
global_batch_size = 8
micro_batch_size = 8
optimizer = "muon"
muon_learning_rate = 2e-2
learning_rate = 4e-2
# Decay does not depend on the learning rates, so that a search for these changes nothing else.
weight_decay_rate = 2e-2

# Only the last step is evaluated, on all sequences of one half of the validation split.
eval_interval = 100_000
eval_full = True
log_interval = 100
checkpoint_interval = 400
keep_last = 1

# Not chosen by what the machine has, so that runs of different machines can be compared.
dtype = "bfloat16"
compile = True
