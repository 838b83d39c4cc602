"""Entries of research/analysis/parts.py that are wrong, the check of contract_of_analyses.py that finds each, and its
message."""

from broken_streams import Gated, additive

from model.block import Add
from model.parameters import Rule, constant
from research.analysis import parts


class NoEdit(Add):
    pass


class LastingEdit(Gated):
    def __init__(self, config):
        super().__init__(config)
        self.rules = {"gate": Rule(constant(1.0))}


def edits_that_change_nothing(write) -> dict:
    return {"nothing": write.forward}


def edits_that_change_a_parameter(write) -> dict:
    def close(*args):
        write.gate.data.zero_()
        return write(*args)

    return {"gate=0": close}


class OfAllTokens(Add):
    pass


class Halved(Add):
    def forward(self, state, h, x_in, c, past=None):
        return state / 2 + h


HERE = "broken_for_analyses."
# {what is wrong: (the model, the table and its entry, the check, its message)}
BROKEN = {
    "an edit of nothing": (
        additive(write=NoEdit),
        (parts.EDITS, f"{HERE}NoEdit", edits_that_change_nothing),
        "edits",
        "nothing of block 0 attn changes nothing",
    ),
    "an edit that stays": (
        additive(write=LastingEdit),
        (parts.EDITS, f"{HERE}LastingEdit", edits_that_change_a_parameter),
        "edits",
        "after its edits the model has another loss",
    ),
    "a detail of all tokens": (
        additive(write=OfAllTokens),
        (
            parts.DETAILS,
            f"{HERE}OfAllTokens",
            lambda write, state, h, x_in, c, written: {"mean_h": h.mean(1)},
        ),
        "details",
        "mean_h is not of each token",
    ),
    "a wrong shortcut": (
        additive(write=Halved),
        (parts.SHORTCUTS, f"{HERE}Halved", parts.get_identity_shortcut),
        "shortcut",
        "its shortcut is not what the write does",
    ),
}
