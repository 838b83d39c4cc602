"""Deep Delta Learning as the first text says it (arXiv 2601.00417v1, January 1, 2026), small
(124M).

    k~ = MLP(mean over the columns of X), k = k~ / (|k~| + eps)   beta = 2 sigmoid(w . tanh(W mean))   v from F

The text trains no language model. Where it is silent this is what the later ones do: four columns,
read by a convolution over tokens; v = W_v F(c), the v-Map without sigmoid and bias; eps, and 128
hidden features of either MLP. The gate's output bias, which the text does not write, starts at 0
and is learned. The rest is train.py's default.

    torchrun --nproc_per_node=4 train.py config/ddl_january_v1_small.py
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope"

ddl_map = "v"
ddl_k_branch = "mlp"
ddl_k_input = "mean"  # column-wise averaging; the text allows flattening as well
ddl_k_norm = "shifted"
ddl_beta_input = "mean"
ddl_beta_single_linear = False
ddl_v_sigmoid = False
ddl_v_bias = False
init = "normal"  # of the code of that time
