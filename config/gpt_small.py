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
# As in the paper, learning rates scale with width (muP), relative to the medium size (1,024).
mup = True

# The authors' code, like nanoGPT's, keeps the residual state in float32 under autocast. bfloat16
# needs less memory and time; compare only runs with the same state_dtype (docs/recipe.md).
state_dtype = "float32"

# It divides the sequences per GPU on 1, 2, 4 or 8 GPUs (480 over their number), and changes the
# result only by rounding.
micro_batch_size = 20
