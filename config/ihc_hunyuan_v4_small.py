"""Hyper-Connections without mixing (iHC) as in Hunyuan V4, small (125M parameters).

The stream's settings are those of HYV4Config and of the layers that it configures in transformers
5.23 (models/hy_v4); comments give the names used there in parentheses. The remaining settings are
train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/ihc_hunyuan_v4_small.py
"""

from config.gpt_small import *

model = "mHC-gpt-mha-rope"
hc_streams = 4  # (hc_mult)
mhc_mix = "identity"

# pre = sigmoid + hc_eps and post = hc_magnitude sigmoid + hc_eps, from a norm with rms_norm_eps
mhc_read_eps = 1e-6  # (hc_eps)
mhc_write_eps = 1e-6  # (hc_eps)
mhc_write_magnitude = 2.0  # (hc_magnitude)
mhc_norm_eps = 1e-5  # (rms_norm_eps)

# HYV4HyperHead
mhc_readout = "sigmoid"

# what is read is rounded to the dtype of the streams; what is written is computed in float32
mhc_read_dtype = "state"
mhc_write_dtype = "float32"

# HYV4PreTrainedModel._init_weights
mhc_scale_init = 0.01
mhc_maps_init_std = 0.006  # (initializer_range)
mhc_bias_init = "additive"
mhc_readout_bias_init = "mean"
