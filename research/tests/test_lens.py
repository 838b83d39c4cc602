"""The logit lens: against the states of the blocks run through the model's end by hand, and loops over tokens."""

import math

import pytest
import torch
from gates_helpers import build_moved, open_run
from helpers import EXAMPLES, SMALL

from data.tokenizer import byte_tokenizer
from model import MODEL_NAMES, build
from model.block import Stream
from model.causality import move_parameters
from research.analysis import lens


def make_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, SMALL["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model_name", [*MODEL_NAMES, *(path.stem for path in EXAMPLES)])
def test_the_last_depth_is_the_model_and_depth_0_has_no_site(model_name, example_streams):
    model = move_parameters(build(model_name, **SMALL))
    ids = make_ids(2, 7)
    logits_by_depth = {}
    with torch.no_grad(), model.through(lens.Lens(model, logits_by_depth.__setitem__)):
        logits_through_lens, _ = model(ids)
    expected, _ = model(ids)
    num_sites = sum(len(block.sites) for block in model.transformer.h)
    assert len(lens.list_depths(model)) == 1 + num_sites
    assert sorted(logits_by_depth) == list(range(1 + num_sites))
    assert torch.equal(logits_by_depth[num_sites], expected)
    assert torch.equal(logits_through_lens, expected)
    state = Stream().begin(model, model.transformer.wte(ids), None)
    assert torch.equal(logits_by_depth[0], model.logits(model.ln_f(model.readout(state))))


# ---- measures ----


def compute_probabilities(logits: torch.Tensor) -> list[float]:
    exponentials = (logits - logits.max()).exp()
    return (exponentials / exponentials.sum()).tolist()


def find_largest(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def add_token_measures(sums: dict[str, list[float]], probabilities: list, target: int) -> None:
    """Add the measures of one token to their sums over tokens, by depth.

    probabilities: [depth][token of the vocabulary]
    """
    final = probabilities[-1]
    top = [find_largest(depth_probabilities) for depth_probabilities in probabilities]
    settled_depth = 0
    for depth, depth_probabilities in enumerate(probabilities):
        sums["loss"][depth] -= math.log(depth_probabilities[target])
        for p, q in zip(final, depth_probabilities):
            sums["kl"][depth] += p * math.log(p / q)
        if top[depth] == top[-1]:
            sums["agrees"][depth] += 1
        if top[depth] == target:
            sums["right"][depth] += 1
        if depth > 0 and top[depth] != top[depth - 1]:
            sums["overwritten"][depth] += 1
            settled_depth = depth
    sums["settles"][settled_depth] += 1


@torch.no_grad()
def test_measures_are_those_of_loops_over_tokens(corpus):
    model = build_moved("DDL-vdim1-gpt-mha-rope", block_size=6)
    run = open_run(model, corpus, num_sequences=3)
    figures = lens.measure(run, batch_size=2)
    names = ("loss", "kl", "agrees", "right", "overwritten", "settles")
    sums = {name: [0.0] * 5 for name in names}
    ids, targets = run.batches.get(run.sequences, 3)
    logits_by_depth = {}
    with model.through(lens.Lens(model, logits_by_depth.__setitem__)):
        model.hidden(ids)
    for sequence in range(3):
        for position in range(6):
            probabilities = [
                compute_probabilities(logits[sequence, position])
                for logits in logits_by_depth.values()
            ]
            add_token_measures(sums, probabilities, targets[sequence, position].item())
    assert figures["tokens"] == 18
    for name, values in sums.items():
        expected = [value / 18 for value in values]
        assert figures[name] == pytest.approx(expected, rel=1e-6, abs=1e-9), name
    assert 0 < figures["overwritten"][1] < 1 or figures["overwritten"][2] > 0


def test_only_scored_tokens_are_measured(corpus, monkeypatch):
    model = build_moved("gpt-mha-rope", block_size=6)
    run = open_run(model, corpus, num_sequences=1)
    ids, targets = run.batches.get(run.sequences, 1)
    measured = lens.measure_tokens(model, ids, targets)
    answers = torch.full_like(targets, -1)
    answers[0, 4:] = targets[0, 4:]
    monkeypatch.setattr(run.batches, "get", lambda *_: (ids, answers))
    result = lens.measure(run, batch_size=1)
    assert result["tokens"] == 2
    for name in ("loss", "kl"):
        expected = measured[name][:, 0, 4:].mean(1).tolist()
        assert result[name] == pytest.approx(expected), name


# ---- the table of a text ----


def read_cells(line: str) -> list[str]:
    """Return the cells of a table's line, with a sign for vertical lines in them."""
    return [cell.strip() for cell in line.replace("\\|", "¦").split("|")[1:-1]]


def test_a_text_is_a_table_of_the_predictions_that_change():
    model = move_parameters(build("DDL-gpt-mha-rope", **SMALL))
    encoding = byte_tokenizer()
    ids = torch.tensor([[256, *b"a| \n"]])
    positions = model.positions(ids)
    states = [model.input_embed(model.transformer.wte(ids))]
    for block in model.transformer.h:
        new_state = block(states[-1], positions)
        states.append(new_state)
    top_by_block = [
        model.logits(model.ln_f(model.readout(state))).argmax(-1)[0].tolist() for state in states
    ]
    lines = lens.format_text_table(model, encoding, ids).splitlines()
    assert read_cells(lines[0])[1:5] == ["token", "next", "embedding", "0 attn"]
    assert len(lines) == 7
    for position, line in enumerate(lines[2:]):
        cells = read_cells(line)
        assert cells[0] == str(position)
        # an empty cell stands for the prediction at the depth before
        predictions = []
        for cell in cells[3:]:
            predictions.append(cell or predictions[-1])
        expected = [
            lens.format_token(encoding, top[position]).replace("\\|", "¦") for top in top_by_block
        ]
        # the embedding, and the second site of each of the two blocks
        assert predictions[::2] == expected
    labels = [read_cells(line)[1] for line in lines[2:]]
    assert labels[1:] == ["a", "¦", "·", "\\n"]
