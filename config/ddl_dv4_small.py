"""Deep Delta Learning with four value channels (d_v = 4), small (124M parameters).

Sublayers read the state through a convolution over tokens (TC).

It follows the text of January 29, 2026: the direction is the sublayer's output, k = h / |h|, the
gate is beta = 2 sigmoid(w . c + b), and the write value is v = W_v x_in (sections 4.2 and B.2).
Where the text is silent, it follows the authors' code (docs/recipe.md);
config/authors.py, given after this file, has the write value of that code.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_small.py
    torchrun --nproc_per_node=4 train.py config/ddl_dv4_small.py config/authors.py
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope"

# To sweep d_v, change only this key: no other key depends on it. The paper's model with d_v = 1 is
# that of config/ddl_dv1_small.py, without a compressor and with a sigmoid on v.
ddl_value_channels = 4
