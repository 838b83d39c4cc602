"""Deep Delta Learning as July's text says it (2026, appendix A.1), small (124M): its DDL, which is
January's DDL-CC-EC.

k~ = h, v = W_v c, beta = 2 sigmoid(w . c + b). The text writes v without a bias, and says that
biases of the backbone are off and the gate's is kept. Of its two gates the linear one fits the
parameters of its table 4. What eps is, and where beta and the read's convolution start, it does not
say: those are train.py's defaults.

    torchrun --nproc_per_node=4 train.py config/ddl_july_small.py
    ... --model=DDL-gpt-mha-rope-EC   its DDL-TC; DDL-gpt-mha-rope: w/o EC; DDL-gpt-mha-rope-CC: DDL-CC w/o EC
    ... --model=DDL-vdim1-gpt-mha-rope     its DDL (d_v = 1)
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope-CC-EC"

ddl_v_input = "context"
ddl_v_sigmoid = False
ddl_v_bias = False
init = "normal"  # of the code of that time
