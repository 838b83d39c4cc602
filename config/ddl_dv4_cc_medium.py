"""Deep Delta Learning (d_v = 4) with a read over value channels, medium (354M parameters).

The settings other than the size are those of config/ddl_dv4_cc_small.py.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_cc_medium.py
"""

from config.ddl_dv4_cc_small import *

# the paper's medium size
num_hidden_layers = 24
num_attention_heads = 8
hidden_size = 1024
# It divides the sequences per GPU on 1, 2, 4 or 8 GPUs (480 over their number), and changes the
# result only by rounding.
micro_batch_size = 10
