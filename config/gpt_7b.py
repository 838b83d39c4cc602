"""The additive baseline with 7B parameters, for several GPUs. No run of this size has been tried.

The recipe is that of the paper, with muP. Its learning rates have not been tuned for this size.

    torchrun --nproc_per_node=8 train.py config/gpt_7b.py --engine=fsdp
"""

from config.gpt_1b import *

num_hidden_layers = 32
num_attention_heads = 32
hidden_size = 4096
# 480 sequences per step on 8 GPUs are 60 on each
micro_batch_size = 10
