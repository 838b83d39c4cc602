"""DDL with one value channel, whose gates are trained to be small.

Each site adds a loss for it, and a statistic.
"""

from .ddl import DeltaBlock, DeltaRewrite, Repeat, SingleChannelRead
from .ddl_config import SingleChannelConfig
from .gpt import GPT


class SparseRewrite(DeltaRewrite):
    def extra_loss(self, state, h, x_in, c, written):
        return 0.01 * self.gate(state, x_in, c).squeeze(-1)  # (B, T)

    def statistics(self, state, h, x_in, c, written):
        update_rms = (written - state).float().square().mean((-1, -2)).sqrt()  # (B, T)
        return {**super().statistics(state, h, x_in, c, written), "update_rms": update_rms}


class SparseBlock(DeltaBlock):
    Write = SparseRewrite


class Model(GPT):
    Config = SingleChannelConfig
    Expander = Repeat
    Block = SparseBlock
    Readout = SingleChannelRead
