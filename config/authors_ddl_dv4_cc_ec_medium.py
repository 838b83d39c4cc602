"""config/ddl_dv4_cc_ec_medium.py with the DDL of the authors' code (354M parameters).

The write value is v = 4 sigmoid(W x_in + b). The convolution over value channels is padded, and a
read vector sums its results.

    torchrun --nproc_per_node=4 train.py config/authors_ddl_dv4_cc_ec_medium.py
"""

from config.ddl_dv4_cc_ec_medium import *

ddl_v_sigmoid = True
ddl_v_bias = True
ddl_cc_read = "pair"
