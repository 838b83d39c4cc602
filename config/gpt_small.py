"""The additive baseline, small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the paper.

    torchrun --nproc_per_node=4 train.py config/gpt_small.py
"""

model = "gpt-mha-rope"

# the paper's small size
num_hidden_layers = 12
num_attention_heads = 6
head_dim = 128
hidden_size = 768
# the paper scales its learning rates by width (muP)
# relative to a width of 1,024, that of the medium size
mup = True

# On 1, 2, 4 or 8 GPUs, this divides the sequences of a step (480). It does not affect the result.
micro_batch_size = 20
