"""Deep Delta Learning whose erase has a gate of its own (d_v = 4), small (124M parameters).

X' = X + k (beta v^T - beta_erase k^T X); both gates start at the same value. All other settings are
those of ddl_dv4_small.py.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_own_erase_gate_small.py
"""

from config.ddl_dv4_small import *

ddl_erase_gate = "own"
