"""The tier cpu-1 of the track for residual streams (research/track.md), which research/track.py runs.

    python data/torch_source/prepare.py
    python research/track.py my-gpt-mha-rope

Nothing of it may change, because stored results would no longer be of the same tier: a run with
another recipe is of another tier, which has a name of its own. track.py sets the model, the rates,
the seed and the number of steps.
"""

from utils import machine as _machine

model = "gpt-mha-rope"
dataset = "torch_source"
device = "cpu"
vocab_size = 2048
block_size = 128
num_hidden_layers = 8
num_attention_heads = 3
head_dim = 32
hidden_size = 96

max_steps = 3200
warmup_steps = 320
global_batch_size = 8
micro_batch_size = 8
optimizer = "muon"
# where the search for rates starts
muon_learning_rate = 7e-3
learning_rate = 2e-2
# Decay does not depend on the learning rates, so that a search for these changes nothing else.
weight_decay_rate = 2e-2

# Only the last step is evaluated, on all sequences of one half of the validation split.
eval_interval = 100_000
eval_full = True
log_interval = 100
checkpoint_interval = 400
keep_last = 1

dtype = "float32"
# It changes a loss by rounding alone, and saves a quarter of the time.
compile = _machine.can_compile()
