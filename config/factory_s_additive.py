"""The additive baseline with the recipe of hyper-connection-factory, size S.

It has 38.5M parameters without the embedding and 64.3M with it, and trains on 0.79B tokens. The
published loss is 3.4439. config/factory_m_additive.py names what differs from that repository.

    python data/fineweb_edu/prepare.py --sample=sample-10BT --max_tokens=890000000
    torchrun --nproc_per_node=1 train.py config/factory_s_additive.py
"""

from config.factory_m_additive import *

num_attention_heads = 8
hidden_size = 512
intermediate_size = 1408
hidden_init_std_factor = 0.45255  # 0.02 * sqrt(512)

learning_rate = 2e-3
min_lr = 2e-4
warmup_steps = 300
max_steps = 3000

eval_interval = 250
