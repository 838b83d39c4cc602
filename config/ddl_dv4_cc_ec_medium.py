"""Deep Delta Learning with four columns, column and embedding convolutions (CC-EC), medium (353M).

The rest is train.py's default, the paper's recipe.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_cc_ec_medium.py
"""

from config.ddl_dv4_cc_ec_small import *

num_hidden_layers = 24
num_attention_heads = 8
hidden_size = 1024
# divides the 480 sequences of a step over 1, 2, 4 or 8 GPUs; the result does not depend on it
micro_batch_size = 10
