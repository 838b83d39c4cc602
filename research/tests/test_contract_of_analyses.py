"""What analyses look at, of every stem of model/ and the examples of tests/streams."""

import importlib
from functools import partial
from types import SimpleNamespace

import broken_for_analyses
import contract_of_analyses
import pytest
from helpers import EXAMPLES
from model_settings import names_and_settings

from model import MODEL_NAMES, model_class
from research.analysis import parts

pytestmark = pytest.mark.usefixtures("example_streams")
ALL = [*MODEL_NAMES, *(path.stem for path in EXAMPLES if path.stem not in MODEL_NAMES)]


@pytest.mark.parametrize("check", contract_of_analyses.CHECKS)
@pytest.mark.parametrize("stem", ALL)
def test_contract(stem, check):
    contract_of_analyses.CHECKS[check](model_class(stem))


@pytest.mark.parametrize("check", contract_of_analyses.CHECKS)
@pytest.mark.parametrize(("stem", "form"), names_and_settings(), ids=str)
def test_contract_of_every_form(stem, form, check):
    cls = model_class(stem)
    contract_of_analyses.CHECKS[check](type(stem, (cls,), {"Config": partial(cls.Config, **form)}))


@pytest.mark.parametrize("fault", broken_for_analyses.BROKEN)
def test_a_wrong_entry_is_caught(fault, monkeypatch):
    cls, (table, key, entry), check, message = broken_for_analyses.BROKEN[fault]
    monkeypatch.setitem(table, key, entry)
    with pytest.raises((AssertionError, ValueError), match=message):
        contract_of_analyses.CHECKS[check](cls)


def test_a_subclass_with_a_forward_of_its_own_has_no_entry_of_its_parent():
    part = broken_for_analyses.Halved(SimpleNamespace(hidden_size=2, branch_mult=1))
    assert parts.find_entry(parts.SHORTCUTS, part) is None
    part = broken_for_analyses.OfAllTokens(SimpleNamespace(hidden_size=2, branch_mult=1))
    assert parts.find_entry(parts.SHORTCUTS, part) is parts.get_identity_shortcut


def test_every_entry_is_of_a_class_that_there_is():
    tables = (parts.EDITS, parts.DETAILS, parts.DIRECTIONS, parts.INTERVALS, parts.SHORTCUTS)
    for key in {key for table in tables for key in table}:
        module, _, name = key.rpartition(".")
        assert hasattr(importlib.import_module(module), name), key
