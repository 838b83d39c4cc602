"""The additive baseline with the recipe of hyper-connection-factory, size M.

The repository wdlctc/hyper-connection-factory compares residual streams with 12 blocks of width 768
and one recipe: AdamW with a learning rate of 1.5e-3, weight decay of 0.1 on all matrices but those of
the stream, 500 warmup steps, linear decay to a tenth of the learning rate over the last fifth, and
1.70B tokens of FineWeb-Edu. It publishes a loss of 3.1993 +- 0.0021 for the additive stream.

This recipe differs from that one as follows. There, windows of the training tokens are drawn at
random with replacement, and the loss is that of 1.64M validation tokens in random windows; here each
sequence is read once per epoch, and all validation tokens are evaluated. Norms there have an eps of
1e-6, and RoPE rotates neighboring features, which is the same function with permuted rows of the
matrices of queries and keys.

    python data/fineweb_edu/prepare.py --sample=sample-10BT --max_tokens=1810000000
    torchrun --nproc_per_node=1 train.py config/factory_m_additive.py
"""

model = "gpt-mha-rope"

num_hidden_layers = 12
num_attention_heads = 12
head_dim = 64
hidden_size = 768
# the size M of that comparison
block_size = 1024
use_qk_rmsnorm = False
state_dtype = "float32"

# N(0, 0.02), and output matrices N(0, 0.02 / sqrt(24)), which is the value of 24 blocks here
init = "normal"
hidden_init_std_factor = 0.5543  # 0.02 * sqrt(768)

# one recipe for all of its streams, without tuning
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
