"""One column of DDL whose gate is trained to be small: an extra loss of each site, and a statistic
for it.
"""

from dataclasses import replace

from model.gpt import GPT
from model.residual import DeltaBlock, DeltaRewrite, Repeat, SingleChannelConfig, SingleChannelRead


class SparseRewrite(DeltaRewrite):
    def extra_loss(self, state, h, x_in, c, written):
        return 0.01 * self.compute_beta(state, x_in, c).mean()

    def statistics(self, state, h, x_in, c, written):
        size = (written - state).float().square().mean((-1, -2)).sqrt()  # (B, T)
        return {**super().statistics(state, h, x_in, c, written), "update_rms": size}


class SparseBlock(DeltaBlock):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.ddl_attn, self.ddl_mlp = SparseRewrite(config), SparseRewrite(config)
        attn, mlp = self.sites
        self.sites = replace(attn, write=self.ddl_attn), replace(mlp, write=self.ddl_mlp)


class Model(GPT):
    Config, Expander, Block, Readout = SingleChannelConfig, Repeat, SparseBlock, SingleChannelRead
