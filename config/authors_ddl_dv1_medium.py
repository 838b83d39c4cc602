"""config/ddl_dv1_medium.py with the DDL of the authors' code (354M parameters).

The write value is v = 4 sigmoid(w . x + b).

    torchrun --nproc_per_node=4 train.py config/authors_ddl_dv1_medium.py
"""

from config.ddl_dv1_medium import *

ddl_v_sigmoid_scale = 4.0
ddl_v_bias = True
