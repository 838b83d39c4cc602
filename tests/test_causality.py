"""model/causality.py: which output is the first that depends on a later token, and where."""

import dataclasses

import pytest
import torch
from broken_streams import additive
from contract import TINY, tokens
from models import build_tiny
from torch import nn

from model.block import Add, Direct
from model.causality import Leak, find_leak, move_parameters
from model.gpt import GPT
from model.residual import DeltaBlock, DeltaRewrite, Repeat, SingleChannelConfig, SingleChannelRead


class AveragedRewrite(DeltaRewrite):
    """A published comparison's "DDL": its direction and gate are means over the whole sequence."""

    def compute_k_hat(self, state, h, x_in, c):
        return super().compute_k_hat(state, h, x_in, c).mean(1, keepdim=True)

    def compute_beta(self, state, x_in, c):
        return super().compute_beta(state, x_in, c).mean(1, keepdim=True)


class AveragedBlock(DeltaBlock):
    """In block 1 alone, the MLP's write is the averaged one."""

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


def moved(cls, **changes):
    """Return a tiny model in float64 with every parameter off its initial value."""
    torch.manual_seed(0)
    return move_parameters(cls(cls.Config(**{**TINY, **changes})).double()).eval()


def test_a_direction_averaged_over_the_sequence_is_a_leak():
    leak = find_leak(moved(AveragedModel), tokens(1, 9))
    assert (leak.layer, leak.site, leak.position) == (1, "mlp", 0)
    assert leak.output == "the state that the write returns"
    assert str(leak).startswith(
        "block 1, mlp: the state that the write returns moves at position 0"
    )


def test_the_same_layer_token_by_token_is_none():
    assert find_leak(build_tiny("DDL-vdim1-gpt-mha-rope").eval(), tokens(1, 9)) is None


class OneAhead(Direct):
    """A read in which position 5 alone sees the next token."""

    def forward(self, x, past=None):
        ahead = torch.zeros_like(x)
        ahead[:, 5] = x[:, 6]
        return x + ahead


class TwoAhead(Direct):
    """A read in which every position sees the token two positions later."""

    def forward(self, x, past=None):
        return x + nn.functional.pad(x, (0, 0, 0, 2))[:, 2:]


@pytest.mark.parametrize(
    ("read", "position", "changed_position"),
    [(OneAhead, 5, 6), (TwoAhead, 0, 2)],
)
def test_the_position_and_the_token_that_moves_it(read, position, changed_position):
    leak = find_leak(moved(additive(read=read)), tokens(1, 9))
    assert (leak.layer, leak.site, leak.output) == (0, "attn", "what the read returns")
    assert (leak.position, leak.changed_position) == (position, changed_position)


def test_the_difference_is_that_of_the_output():
    """The read adds x of position 6 to that of position 5: what moves is the embedding's difference."""
    model = moved(additive(read=OneAhead))
    ids = tokens(1, 9)
    table = model.transformer.wte.weight
    changed = (table[(ids[0, 6] + 1) % TINY["vocab_size"]] - table[ids[0, 6]]).abs().max()
    assert find_leak(model, ids).difference == pytest.approx(changed.item(), rel=1e-12)


def whole_sequence(part):
    """Return a class of the part whose output has the mean over all tokens added."""

    class Whole(part):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return output + output.mean(1, keepdim=True)

    return Whole


BEFORE_AND_AFTER = {
    "the state that the expander returns": {"Expander": whole_sequence(Direct)},
    "the normalized readout": {"Readout": whole_sequence(Direct)},
}


@pytest.mark.parametrize("output", BEFORE_AND_AFTER)
def test_leaks_outside_of_the_blocks(output):
    leak = find_leak(moved(type("Model", (GPT,), BEFORE_AND_AFTER[output])), tokens(1, 9))
    assert (leak.layer, leak.site, leak.output, leak.position) == (None, None, output, 0)


def test_a_leak_of_the_output_layer():
    class Model(GPT):
        def logits(self, hidden):
            logits = super().logits(hidden)
            return logits + logits.mean(1, keepdim=True)

    assert find_leak(moved(Model), tokens(1, 9)).output == "the logits"


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
    [(Noisy, "something else of the same tokens each time"), (NotFinite, "is not finite")],
)
def test_what_cannot_be_compared_is_refused(read, message):
    with pytest.raises(ValueError, match=message):
        find_leak(moved(additive(read=read)), tokens(1, 4))


def test_a_single_token_is_refused():
    with pytest.raises(ValueError, match=r"ids are \(1, 1\); give one sequence"):
        find_leak(moved(GPT), tokens(1, 1))
