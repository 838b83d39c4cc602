"""Deep Delta Learning with four columns, read by a convolution over columns (CC), small (124M).

The rest is train.py's default, the paper's recipe.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_cc_small.py
"""

model = "DDL-gpt-mha-rope-CC"

ddl_value_channels = 4  # the kernel size follows by itself: a sweep over d_v changes this line alone
num_hidden_layers = 12
num_attention_heads = 6
head_dim = 128
hidden_size = 768
mup = True

micro_batch_size = 20  # divides the 480 sequences of a step over 1, 2, 4 or 8 GPUs; the result does not depend on it
