"""Deep Delta Learning (d_v = 1) as version 2 of the paper describes it, small (124M parameters).

Version 2 (January 29, 2026) uses the k-Map: k~ = h and v = sigmoid(w_v . x) (section 4.1), with
beta = 2 sigmoid(w . c + b) (appendix B.2). For d_v = 4 it omits the sigmoid (section 4.2). The
released code computes v = 4 sigmoid(w_v . x + b) instead, which is the default here.
config/ddl_january_v2_small.py lists what the text leaves open, and the choices made here.

    torchrun --nproc_per_node=4 train.py config/ddl_january_v2_dv1_small.py
"""

from config.gpt_small import *

model = "DDL-vdim1-gpt-mha-rope"

ddl_v_sigmoid_scale = 1.0
ddl_v_bias = False
init = "normal"  # as in the code that was released at that time
