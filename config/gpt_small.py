"""The additive baseline, small (124M). The rest is train.py's default, the paper's recipe.

torchrun --nproc_per_node=4 train.py config/gpt_small.py
"""

model = "gpt-mha-rope"

num_hidden_layers = 12
num_attention_heads = 6
head_dim = 128
hidden_size = 768
mup = True

# divides the 480 sequences of a step over 1, 2, 4 or 8 GPUs; the result does not depend on it
micro_batch_size = 20
