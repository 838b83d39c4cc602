"""Manifold-constrained Hyper-Connections as in DeepSeek-V4, small (125M parameters).

The stream's settings are those of DeepseekV4Config and of the layers that it configures in
transformers 5.23 (models/deepseek_v4); comments give the names used there in parentheses. The
remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/mhc_deepseek_v4_small.py
"""

from config.gpt_small import *

model = "mHC-gpt-mha-rope"
hc_streams = 4  # (hc_mult)

# comb, with its rows normalized last in terms of the matrix that meets the streams
mhc_mix = "sinkhorn"
mhc_iterations = 20  # (hc_sinkhorn_iters)
mhc_rows_last = True

# pre = sigmoid + hc_eps and post = 2 sigmoid, from a norm with rms_norm_eps
mhc_read_eps = 1e-6  # (hc_eps)
mhc_write_eps = 0.0
mhc_write_magnitude = 2.0
mhc_norm_eps = 1e-6  # (rms_norm_eps)

# DeepseekV4HyperHead
mhc_readout = "sigmoid"

# post.to(dtype), comb.to(dtype) and collapsed.to(dtype), where dtype is that of the streams
mhc_read_dtype = "state"
mhc_write_dtype = "state"

# DeepseekV4PreTrainedModel._init_weights
mhc_scale_init = 1.0
mhc_maps_init_std = 0.02  # (initializer_range)
mhc_bias_init = "zeros"
mhc_readout_bias_init = "zeros"
