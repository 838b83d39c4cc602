"""Manifold-constrained Hyper-Connections as in GLM-5.3, small (125M parameters).

The stream's settings are those of Glm5NextTextConfig and of the layers that it configures in
transformers 5.23 (models/glm5_next); comments give the names used there in parentheses. The layers
are those of DeepSeek-V4 with a different eps, and the readout is the mean of the streams. The
remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/mhc_glm_5_3_small.py
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
mhc_norm_eps = 1e-5  # (rms_norm_eps)

# Glm5NextTextHyperHead
mhc_readout = "mean"

# post.to(dtype), comb.to(dtype) and collapsed.to(dtype), where dtype is that of the streams
mhc_read_dtype = "state"
mhc_write_dtype = "state"

# Glm5NextPreTrainedModel._init_weights
mhc_scale_init = 1.0
mhc_maps_init_std = 0.02  # a literal there
mhc_bias_init = "zeros"
