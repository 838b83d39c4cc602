"""The word problem of the symmetric group S_4 on one CPU core, without torch.compile.

Prepare the task with its default options, then train a model on it:

    python data/permutations/prepare.py
    python train.py config/permutations_cpu.py
"""

model = "DDL-gpt-mha-rope"
dataset = "permutations"
device = "cpu"
dtype = "float32"
# compiling would take longer than these few steps
compile = False
num_hidden_layers = 4
num_attention_heads = 2
head_dim = 32
hidden_size = 64

max_steps = 300
global_batch_size = 256
micro_batch_size = 256
optimizer = "muon"
learning_rate = 1e-2
warmup_steps = 30
eval_interval = 100
eval_batches = 1
log_interval = 50
checkpoint_interval = 300
