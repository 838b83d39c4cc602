"""Deep Delta Learning as the revised text says it (January 29, 2026), one column (d_v = 1), small
(124M).

Section 4.1, k-Map: k~ = h, v = sigmoid(w_v . x), with four columns no sigmoid
(config/ddl_january_v2_small.py); B.2: beta = 2 sigmoid(w . c + b). The released code, and this
code's default, has v = 4 sigmoid(w_v . x + b). What the text does not say is as in that file.

    torchrun --nproc_per_node=4 train.py config/ddl_january_v2_dv1_small.py
"""

from config.gpt_small import *

model = "DDL-vdim1-gpt-mha-rope"

ddl_v_sigmoid_scale = 1.0
ddl_v_bias = False
init = "normal"  # of the code of that time
