"""The MGT paper's experiments at its own sizes (sections 4.2 to 4.6); each overrides what it has of its own.

As the paper has it: d = 256, batch 64, learning rate 1e-3, 50 epochs. Where it is silent: AdamW, cosine to a twentieth
of the rate and weight decay are this repository's; the warm-up is 500 steps (an epoch of WikiText-2 is about 150
steps), sequences have 256 tokens, heads 32 features, and the tokens are GPT-2's.
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
