"""Deep Delta Learning as the paper's July 2026 version describes it, small (124M parameters).

This is the model that the July version calls DDL (appendix A), and the January version DDL-CC-EC:
k~ = h, v = W_v c, beta = 2 sigmoid(w . c + b) and x_in[i] = sum_j c[i, j] X[i, j]. The text writes v
without a bias, and says that the backbone has no biases but the gate has one. Of its two gates, the
linear one agrees with the parameter counts of table 4. The text gives neither eps nor the initial
values of beta and of the read. For these and for the remaining settings, this file uses the authors'
code: train.py's defaults, and those of config/gpt_small.py.

    torchrun --nproc_per_node=4 train.py config/ddl_july_small.py

The other models of that version are trained with

    --model=DDL-gpt-mha-rope-EC       DDL-TC
    --model=DDL-gpt-mha-rope          DDL-TC without EC
    --model=DDL-gpt-mha-rope-CC       DDL-CC without EC
    --model=DDL-vdim1-gpt-mha-rope    DDL (d_v = 1)
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope-CC-EC"

ddl_v_input = "context"
ddl_v_sigmoid = False  # with one value channel neither
