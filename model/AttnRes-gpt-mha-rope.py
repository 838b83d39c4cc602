"""Attention Residuals (arXiv 2603.15031): sublayers attend over earlier sublayer outputs.

The attention replaces the additive residual stream, or is added to it (Delta Attention Residuals,
arXiv 2605.18855). The sources are all sublayer outputs, or their sums over blocks of sublayers.
"""

import torch

from .attention_residuals import (
    AttentionResidualsBlock,
    AttentionResidualsConfig,
    depth_readout,
    first_source,
)
from .gpt import GPT


class Model(GPT):
    Config = AttentionResidualsConfig
    Expander = staticmethod(first_source)
    Block = AttentionResidualsBlock
    Readout = staticmethod(depth_readout)

    @torch.no_grad()
    def from_additive(self) -> None:
        if self.config.attn_res_form != "delta":
            raise ValueError(
                "attn_res_form=replace has no additive residual stream; use --attn_res_form=delta"
            )
        for site in self.sites:
            site.read.gate.zero_()
