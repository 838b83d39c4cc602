"""Deep Delta Learning with one value channel (d_v = 1), small (124M parameters).

It follows the text of January 29, 2026: the direction is the sublayer's output, k = h / |h|, the
gate is beta = 2 sigmoid(w . c + b), and the write value is v = sigmoid(w_v . x) (sections 4.1 and
B.2). Where the text is silent, it follows the authors' code (docs/recipe.md);
config/authors.py, given after this file, has the write value of that code.

    torchrun --nproc_per_node=4 train.py config/ddl_dv1_small.py
"""

from config.gpt_small import *

model = "DDL-vdim1-gpt-mha-rope"
