"""The recipe of wdlctc/hyper-connection-factory, size M: the additive stream (published loss 3.1993 +- 0.0021).

It compares residual streams at 12 blocks of 768 features, one recipe for all: AdamW at 1.5e-3,
weight decay 0.1, 500 steps of warm-up, a fall to a tenth over the last fifth, 1.70B tokens of
FineWeb-Edu. The order of its tokens cannot be had, and its norms have an eps of 1e-6: this file is
the bridge between its figures and ours.

    python data/fineweb_edu/prepare.py --sample=sample-10BT --max_tokens=1720000000
    torchrun --nproc_per_node=1 train.py config/factory_m_additive.py
"""

model = "gpt-mha-rope"

num_hidden_layers = 12
num_attention_heads = 12
head_dim = 64
hidden_size = 768
block_size = 1024
use_qk_rmsnorm = False
init = "normal"
hidden_init_std_factor = 0.5543  # 0.02 sqrt(768)

optimizer = "adamw"
learning_rate = 1.5e-3
min_lr = 1.5e-4
schedule = "wsd"
warmup_steps = 500
max_steps = 6500
global_batch_size = 256
micro_batch_size = 32
weight_decay = 0.1

eval_interval = 500
