"""DDL with one value channel, whose writes have a statistic more: the size of their update."""

from .ddl import DeltaBlock, DeltaRewrite, Repeat, SingleChannelRead
from .ddl_config import SingleChannelConfig
from .gpt import GPT


class MeasuredRewrite(DeltaRewrite):
    def statistics(self, state, h, x_in, c, written):
        update_rms = (written - state).float().square().mean((-1, -2)).sqrt()  # (B, T)
        return {**super().statistics(state, h, x_in, c, written), "update_rms": update_rms}


class MeasuredBlock(DeltaBlock):
    Write = MeasuredRewrite


class Model(GPT):
    Config = SingleChannelConfig
    Expander = Repeat
    Block = MeasuredBlock
    Readout = SingleChannelRead
