"""The additive baseline with 1.3B parameters, for several GPUs. No run of this size has been tried.

The recipe is that of the paper, with muP. Its learning rates have not been tuned for this size.

20 tokens per parameter are 53,000 steps:

    torchrun --nproc_per_node=8 train.py config/gpt_1b.py --max_steps=53000
"""

from config.gpt_medium import *

num_hidden_layers = 24
num_attention_heads = 16
hidden_size = 2048
# 480 sequences per step on 8 GPUs are 60 on each
micro_batch_size = 20
