"""Deep Delta Learning as the revised text says it (January 29, 2026), four columns (d_v = 4), small
(124M).

Section 4.2, k-Map: k~ = h, v = W_v x_in; B.2: beta = 2 sigmoid(w . c + b). The released code does
otherwise, which is this code's default: v = 4 sigmoid(W_v x_in + b) (config/ddl_dv4_small.py). The
text does not say which of B.2's two gates was trained, where beta starts, and what eps is: those
are train.py's defaults. B.2 also says that the value's branch is like the backbone's sublayers,
which is the v-Map (--ddl_map=v); the k-Map is what section 4 evaluates.

    torchrun --nproc_per_node=4 train.py config/ddl_january_v2_small.py
    ... --model=DDL-gpt-mha-rope-CC    -EC and -CC-EC alike: the other rows
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope"

ddl_v_sigmoid = False
ddl_v_bias = False
init = "normal"  # of the code of that time
