"""Deep Delta Learning (d_v = 4) as version 2 of the paper describes it, small (124M parameters).

Version 2 (January 29, 2026) evaluates the k-Map: k~ = h and v = W_v x_in (section 4.2), with
beta = 2 sigmoid(w . c + b) (appendix B.2). The released code computes v = 4 sigmoid(W_v x_in + b)
instead, which is the default here (config/ddl_dv4_small.py).

The text does not say which of the two gates in B.2 was trained, at what value beta starts, or what
eps is. For these and for the remaining settings, this file uses train.py's defaults. B.2 also says
that the value branch is built like the backbone's sublayers, which describes the v-Map
(--ddl_map=v), but section 4 evaluates the k-Map.

    torchrun --nproc_per_node=4 train.py config/ddl_january_v2_small.py

The other rows of the paper's tables are trained with --model=DDL-gpt-mha-rope-EC,
--model=DDL-gpt-mha-rope-CC and --model=DDL-gpt-mha-rope-CC-EC.
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope"

ddl_v_sigmoid = False
ddl_v_bias = False
init = "normal"  # as in the code that was released at that time
