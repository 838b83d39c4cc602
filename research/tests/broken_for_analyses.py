"""Wrong entries of research/analysis/parts.py, for tests of the checks in contract_of_analyses.py."""

from dataclasses import dataclass

from broken_streams import Gated, additive

from model.block import Add
from model.gpt import GPT
from model.parameters import Rule, constant
from research.analysis import parts


class WriteWithIdleEdit(Add):
    """Have an edit that computes the same as the write."""


def make_edit_without_effect(write) -> dict:
    return {"nothing": write.forward}


class WriteWithLastingEdit(Gated):
    """Have an edit that changes a parameter."""

    def __init__(self, config):
        super().__init__(config)
        self.rules = {"gate": Rule(constant(1.0))}


def make_lasting_edit(write) -> dict:
    def close_gate(*args):
        write.gate.data.zero_()
        return write(*args)

    return {"gate=0": close_gate}


class WriteWithMean(Add):
    """Have a detail that is not of each token."""


def measure_mean_over_tokens(write, state, h, x_in, c, written) -> dict:
    return {"mean_h": h.mean(1)}


@dataclass
class WrongEntry:
    """An entry of a table that a check must refuse."""

    model_class: type[GPT]

    # a table of parts.py, a key in it, and the wrong entry
    table: dict
    key: str
    entry: object

    # name of the check, and a part of its message
    check: str
    message: str


WRONG_ENTRIES = {
    "an edit without an effect": WrongEntry(
        model_class=additive(write=WriteWithIdleEdit),
        table=parts.EDITS,
        key="broken_for_analyses.WriteWithIdleEdit",
        entry=make_edit_without_effect,
        check="edits",
        message="nothing of block 0 attn changes nothing",
    ),
    "a lasting edit": WrongEntry(
        model_class=additive(write=WriteWithLastingEdit),
        table=parts.EDITS,
        key="broken_for_analyses.WriteWithLastingEdit",
        entry=make_lasting_edit,
        check="edits",
        message="after its edits the model has another loss",
    ),
    "a detail of all tokens": WrongEntry(
        model_class=additive(write=WriteWithMean),
        table=parts.DETAILS,
        key="broken_for_analyses.WriteWithMean",
        entry=measure_mean_over_tokens,
        check="details",
        message="mean_h is not of each token",
    ),
}
