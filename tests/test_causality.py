"""Find the first output that depends on a later token (model/causality.py)."""

import pytest
import torch
from broken_streams import with_sites, with_write
from contract import TINY, tiny, tokens
from torch import nn

from model.block import Add
from model.causality import find_leak, move_parameters
from model.gpt import GPT


def see_next_at_one_position(x, past=None):
    """Read the state; position 5 alone sees the next token."""
    ahead = torch.zeros_like(x)
    ahead[:, 5] = x[:, 6]
    return x + ahead


def see_second_next(x, past=None):
    """Read the state; every position sees the token two positions later."""
    return x + nn.functional.pad(x, (0, 0, 0, 2))[:, 2:]


@pytest.mark.parametrize(
    ("read", "position", "changed_position"),
    [(see_next_at_one_position, 5, 6), (see_second_next, 0, 2)],
)
def test_the_position_and_the_token_that_moves_it(read, position, changed_position):
    leak = find_leak(tiny(with_sites(read=read)), tokens(1, 9))
    assert (leak.layer, leak.site, leak.output) == (0, "attn", "what the read returns")
    assert (leak.position, leak.changed_position) == (position, changed_position)


def test_the_difference_is_that_of_the_output():
    """The read adds the embedding of position 6, so that the output moves as much as it does."""
    model = tiny(with_sites(read=see_next_at_one_position))
    ids = tokens(1, 9)
    table = model.transformer.wte.weight
    changed = (table[(ids[0, 6] + 1) % TINY["vocab_size"]] - table[ids[0, 6]]).abs().max()
    assert find_leak(model, ids).difference == pytest.approx(changed.item(), rel=1e-12)


def add_mean(x, past=None):
    """Add the mean over all tokens."""
    return x + x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("part", "output"),
    [
        ("Expander", "the state that the expander returns"),
        ("Readout", "the normalized readout"),
    ],
)
def test_leaks_outside_of_the_blocks(part, output):
    model_class = type("Model", (GPT,), {part: staticmethod(lambda config: add_mean)})
    leak = find_leak(tiny(model_class), tokens(1, 9))
    assert (leak.layer, leak.site, leak.output, leak.position) == (None, None, output, 0)


def test_a_leak_of_the_output_layer():
    class Model(GPT):
        def logits(self, hidden):
            return add_mean(super().logits(hidden))

    assert find_leak(tiny(Model), tokens(1, 9)).output == "the logits"


class AddGatedMean(Add):
    """The write of a gate that is averaged over the sequence, as in a published comparison's "DDL"."""

    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(()))
        self.rules = {}

    def forward(self, state, h, x_in, c, past=None):
        return state + h + self.gate * h.mean(1, keepdim=True)


def test_a_gate_of_zero_hides_a_leak_until_the_parameters_are_moved():
    model_class = with_write(AddGatedMean, init_weights=lambda self: None)
    model = model_class(model_class.Config(**TINY)).double()
    for parameter in model.parameters():
        if parameter.ndim > 0:
            nn.init.normal_(parameter)
    assert find_leak(model, tokens(1, 5)) is None
    leak = find_leak(move_parameters(model), tokens(1, 5))
    assert str(leak).startswith("block 0, attn: the state that the write returns changes by ")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda x, past: x + torch.rand_like(x), "different outputs for the same tokens"),
        (lambda x, past: x / 0, "is not finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(read, message):
    with pytest.raises(ValueError, match=message):
        find_leak(tiny(with_sites(read=read)), tokens(1, 4))


def test_a_single_token_is_refused():
    with pytest.raises(ValueError, match=r"ids have the shape \(1, 1\); give one sequence"):
        find_leak(tiny(GPT), tokens(1, 1))
