"""The Manifold-Geometric Transformer at a size where every arm learns, on one CPU core.

    python data/shakespeare_char/prepare.py
    python train.py config/mgt_shakespeare.py --mgt_arm=standard

The text is the characters of Shakespeare. The commands of the paper's five experiments are in
research/studies/mgt/README.md.
"""

model = "MGT-gpt-mha"
dataset = "shakespeare_char"
device = "cpu"
dtype = "float32"
compile = False  # compiling 24 blocks takes as long as nine runs of them
kernels = "off"

block_size = 32
num_attention_heads = 2
head_dim = 16
hidden_size = 32
# at 0.02 the first updates drown the embedding, which the norm after the update then rescales
embedding_init_std = 0.2

global_batch_size = 8
micro_batch_size = 8
optimizer = "adamw"
beta1 = 0.9
beta2 = 0.95
weight_decay = 0.1
grad_clip = 1.0
schedule = "cosine"  # to a twentieth of the peak, which is the default

# An evaluation reads 512 sequences, the same ones in every run.
eval_interval = 100_000
eval_batches = 64
eval_full = False
log_interval = 50
checkpoint_interval = 100_000
