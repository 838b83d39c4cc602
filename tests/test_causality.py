"""Find the first output that depends on a later token (model/causality.py)."""

import dataclasses

import pytest
import torch
from broken_streams import additive
from contract import TINY, tiny, tokens
from torch import nn

from model.block import Add, Direct
from model.causality import Leak, find_leak, move_parameters
from model.ddl import DeltaBlock, DeltaRewrite, Repeat, SingleChannelRead
from model.ddl_config import SingleChannelConfig
from model.gpt import GPT


class AveragedRewrite(DeltaRewrite):
    """A published comparison's "DDL": its direction and gate are means over the whole sequence."""

    def __init__(self, config):
        super().__init__(config)
        direction = self.direction
        gate = self.gate
        self.direction = lambda *args: direction(*args).mean(1, keepdim=True)
        self.gate = lambda *args: gate(*args).mean(1, keepdim=True)


class AveragedBlock(DeltaBlock):
    """A block whose MLP has the averaged write, in block 1 alone."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        if layer == 1:
            self.ddl_mlp = AveragedRewrite(config)
            attn, mlp = self.sites
            self.sites = (attn, dataclasses.replace(mlp, write=self.ddl_mlp))


class AveragedModel(GPT):
    Config = SingleChannelConfig
    Expander = Repeat
    Block = AveragedBlock
    Readout = SingleChannelRead


def test_a_direction_averaged_over_the_sequence_is_a_leak():
    leak = find_leak(tiny(AveragedModel), tokens(1, 9))
    assert (leak.layer, leak.site, leak.position) == (1, "mlp", 0)
    assert leak.output == "the state that the write returns"
    assert str(leak).startswith("block 1, mlp: the state that the write returns changes by ")


class OnePositionSeesNext(Direct):
    """A read in which position 5 alone sees the next token."""

    def forward(self, x, past=None):
        ahead = torch.zeros_like(x)
        ahead[:, 5] = x[:, 6]
        return x + ahead


class AllSeeSecondNext(Direct):
    """A read in which every position sees the token two positions later."""

    def forward(self, x, past=None):
        return x + nn.functional.pad(x, (0, 0, 0, 2))[:, 2:]


@pytest.mark.parametrize(
    ("read", "position", "changed_position"),
    [(OnePositionSeesNext, 5, 6), (AllSeeSecondNext, 0, 2)],
)
def test_the_position_and_the_token_that_moves_it(read, position, changed_position):
    leak = find_leak(tiny(additive(read=read)), tokens(1, 9))
    assert (leak.layer, leak.site, leak.output) == (0, "attn", "what the read returns")
    assert (leak.position, leak.changed_position) == (position, changed_position)


def test_the_difference_is_that_of_the_output():
    """The read adds the embedding of position 6, so that the output moves as much as it does."""
    model = tiny(additive(read=OnePositionSeesNext))
    ids = tokens(1, 9)
    table = model.transformer.wte.weight
    changed = (table[(ids[0, 6] + 1) % TINY["vocab_size"]] - table[ids[0, 6]]).abs().max()
    assert find_leak(model, ids).difference == pytest.approx(changed.item(), rel=1e-12)


class AddsMean(Direct):
    """A part that adds the mean over all tokens."""

    def forward(self, x, past=None):
        return x + x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("part", "output"),
    [
        ("Expander", "the state that the expander returns"),
        ("Readout", "the normalized readout"),
    ],
)
def test_leaks_outside_of_the_blocks(part, output):
    leak = find_leak(tiny(type("Model", (GPT,), {part: AddsMean})), tokens(1, 9))
    assert (leak.layer, leak.site, leak.output, leak.position) == (None, None, output, 0)


def test_a_leak_of_the_output_layer():
    class Model(GPT):
        def logits(self, hidden):
            logits = super().logits(hidden)
            return logits + logits.mean(1, keepdim=True)

    assert find_leak(tiny(Model), tokens(1, 9)).output == "the logits"


def test_a_gate_of_zero_hides_a_leak_until_the_parameters_are_moved():
    class Hidden(Add):
        def __init__(self, config):
            super().__init__(config)
            self.gate = nn.Parameter(torch.zeros(()))
            self.rules = {}

        def forward(self, state, h, x_in, c, past=None):
            return state + h + self.gate * h.mean(1, keepdim=True)

    cls = additive(write=Hidden, init_weights=lambda self: None)
    model = cls(cls.Config(**TINY)).double()
    for parameter in model.parameters():
        if parameter.ndim > 0:
            nn.init.normal_(parameter)
    assert find_leak(model, tokens(1, 5)) is None
    leak = find_leak(move_parameters(model), tokens(1, 5))
    assert isinstance(leak, Leak)
    assert leak.output == "the state that the write returns"


class Noisy(Direct):
    def forward(self, x, past=None):
        return x + torch.rand_like(x)


class NotFinite(Direct):
    def forward(self, x, past=None):
        return x / 0


@pytest.mark.parametrize(
    ("read", "message"),
    [(Noisy, "different outputs for the same tokens"), (NotFinite, "is not finite")],
)
def test_what_cannot_be_compared_is_refused(read, message):
    with pytest.raises(ValueError, match=message):
        find_leak(tiny(additive(read=read)), tokens(1, 4))


def test_a_single_token_is_refused():
    with pytest.raises(ValueError, match=r"ids have the shape \(1, 1\); give one sequence"):
        find_leak(tiny(GPT), tokens(1, 1))
