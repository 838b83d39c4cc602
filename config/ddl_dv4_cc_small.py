"""Deep Delta Learning (d_v = 4) with a read over value channels, small (124M parameters).

Sublayers read the state through a convolution over value channels (CC), as in the text of January
29, 2026: x_in[i] = sum_j c[i, j] X[i, j], without a read vector (section B.3). The text does not
say how c starts; here it starts at 1 / d_v, as the read vector of TC does. The remaining settings
are those of config/ddl_dv4_small.py.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_cc_small.py
"""

from config.ddl_dv4_small import *

model = "DDL-gpt-mha-rope-CC"
