"""Register rebinding on one CPU core, without torch.compile.

Prepare the task with its default options, then train a model on it:

    python data/registers/prepare.py
    python train.py config/registers_cpu.py
"""

model = "DDL-gpt-mha-rope"
dataset = "registers"
device = "cpu"
dtype = "float32"
# compiling would take longer than these few steps
compile = False
num_hidden_layers = 4
num_attention_heads = 2
head_dim = 32
hidden_size = 64

max_steps = 150
global_batch_size = 64
micro_batch_size = 64
optimizer = "muon"
learning_rate = 1e-2
warmup_steps = 30
eval_interval = 50
eval_batches = 4
log_interval = 50
checkpoint_interval = 150
