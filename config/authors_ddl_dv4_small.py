"""config/ddl_dv4_small.py with the DDL of the authors' code (124M parameters).

The write value is v = 4 sigmoid(W x_in + b).

    torchrun --nproc_per_node=4 train.py config/authors_ddl_dv4_small.py
"""

from config.ddl_dv4_small import *

ddl_v_sigmoid = True
ddl_v_bias = True
