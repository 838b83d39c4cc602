"""Deep Delta Learning as version 1 of the paper describes it, small (124M parameters).

Version 1 (arXiv 2601.00417v1, January 1, 2026) computes v from the sublayer's output, and

    k~ = MLP(mean(X)),  k = k~ / (|k~| + eps),  beta = 2 sigmoid(w . tanh(W mean(X)))

where mean(X) is the mean of the state over its value channels. Version 1 does not train a language
model. Where it does not describe the model, this file follows the later versions: four value
channels, read by a convolution over tokens; v = W_v F(c), which is the v-Map without sigmoid and
bias; the value of eps; and 128 hidden features in both MLPs. The gate's output bias, which this
formula omits, starts at 0 and is learned. The remaining settings are train.py's defaults.

    torchrun --nproc_per_node=4 train.py config/ddl_january_v1_small.py
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope"

ddl_map = "v"
ddl_k_branch = "mlp"
ddl_k_input = "mean"  # the text also allows the flattened state
ddl_k_norm = "shifted"
ddl_beta_input = "mean"
ddl_beta_single_linear = False
init = "normal"  # as in the code that was released at that time
