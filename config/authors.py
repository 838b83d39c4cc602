"""DDL in the form of the authors' code, given after a config of the paper's text.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_cc_small.py config/authors.py

The write value is v = 4 sigmoid(W x_in + b), and the convolution over value channels (CC) is padded,
with a read vector that sums its results. The convolutions of the compressors start as means. The run
folder is runs/ddl_dv4_cc_small-authors.
"""

_model = globals().get("model", "")
if not _model.startswith("DDL-"):
    raise ValueError(
        "give this file after a config of DDL: train.py config/ddl_dv4_small.py config/authors.py"
    )

ddl_v_sigmoid = True
ddl_v_sigmoid_scale = 4.0
ddl_v_bias = True
if "vdim1" not in _model:
    ddl_state_conv_init = "mean"
if "-CC" in _model:
    ddl_cc_read = "pair"
