"""The MGT paper's experiments at its own sizes (sections 4.2 to 4.6).

experiments.py overrides the keys in which an experiment differs. From the paper are d = 256, batches
of 64, the learning rate of 1e-3 and 50 epochs. The paper does not give the others: AdamW, weight
decay and a cosine schedule to a twentieth of the learning rate are this repository's defaults; the
warm-up is 500 steps (an epoch of WikiText-2 is about 150 steps), sequences have 256 tokens, heads
have 32 features, and the tokens are GPT-2's.
"""

model = "MGT-gpt-mha"
dataset = "wikitext2"  # python data/wikitext/prepare.py --version=2 --out=data/wikitext2
block_size = 256
num_attention_heads = 8
head_dim = 32
hidden_size = 256

global_batch_size = 64
micro_batch_size = 64
learning_rate = 1e-3
warmup_steps = 500

eval_interval = 200
eval_batches = 8
log_interval = 50
