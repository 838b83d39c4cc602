"""Deep Delta Learning (d_v = 4) with CC and the embedding convolution, small (124M parameters).

The embedding convolution (EC) expands the token embedding to the value channels. The remaining
settings are those of config/ddl_dv4_cc_small.py.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_cc_ec_small.py
"""

from config.ddl_dv4_cc_small import *

model = "DDL-gpt-mha-rope-CC-EC"
