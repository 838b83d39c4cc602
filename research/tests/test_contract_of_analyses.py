"""What the analyses look at, in every variant of model/ and in the examples of tests/streams."""

import importlib
from functools import partial

import pytest
from broken_for_analyses import WRONG_ENTRIES
from contract_of_analyses import CHECKS
from helpers import EXAMPLES
from model_settings import names_and_settings

from model import MODEL_NAMES, model_class
from model.ddl import DeltaRewrite
from research.analysis import parts

pytestmark = pytest.mark.usefixtures("example_streams")
ALL_NAMES = [*MODEL_NAMES, *(path.stem for path in EXAMPLES if path.stem not in MODEL_NAMES)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("model_name", ALL_NAMES)
def test_contract(model_name, check):
    CHECKS[check](model_class(model_name))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("model_name", "settings"), names_and_settings(), ids=str)
def test_contract_with_other_settings(model_name, settings, check):
    cls = model_class(model_name)
    cls_with_settings = type(model_name, (cls,), {"Config": partial(cls.Config, **settings)})
    CHECKS[check](cls_with_settings)


@pytest.mark.parametrize("fault", WRONG_ENTRIES)
def test_a_wrong_entry_is_noticed(fault, monkeypatch):
    wrong = WRONG_ENTRIES[fault]
    monkeypatch.setitem(wrong.table, wrong.key, wrong.entry)
    with pytest.raises((AssertionError, ValueError), match=wrong.message):
        CHECKS[wrong.check](wrong.model_class)


class OwnRewrite(DeltaRewrite):
    def forward(self, state, h, x_in, c, past=None):
        return state


class InheritingRewrite(DeltaRewrite):
    pass


def test_a_subclass_has_the_entries_of_its_parent_unless_it_has_a_forward_of_its_own():
    config = model_class("DDL-gpt-mha-rope").Config()
    assert parts.find_entry(parts.EDITS, OwnRewrite(config)) is None
    edits = parts.find_entry(parts.EDITS, InheritingRewrite(config))
    assert edits is parts.make_delta_rewrite_edits


@pytest.mark.parametrize("table", ["EDITS", "DETAILS", "DIRECTIONS", "INTERVALS"])
def test_every_entry_is_of_an_existing_class(table):
    for key in getattr(parts, table):
        module_name, _, class_name = key.rpartition(".")
        assert hasattr(importlib.import_module(module_name), class_name), key
