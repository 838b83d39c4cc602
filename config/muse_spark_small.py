"""The residual gate of Muse Spark, small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/muse_spark_small.py
"""

from config.gpt_small import *

model = "MuseSpark-gpt-mha-rope"
