"""Test the synthetic tasks: plain Python solves their sequences and finds the same answers."""

import contextlib
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, configure, one_line_error, small_run
from in_process import call

from data import tasks
from data.loader import TaskTrainBatches, TaskValidationBatches, open_validation_batches
from data.shards import open_corpus
from data.tasks import Copy, Recall, Registers, Task
from training import metrics
from training.batches import open_data
from training.validation import evaluate
from utils.processes import World


def solve_copy(ids: list[int], task: Copy) -> list[int]:
    """Return the symbols that come next, in the second half alone if only answers are trained on."""
    first_half = ids[1 : task.half + 1]
    return ([-1] * task.half if task.trained == "answers" else first_half) + first_half


def solve_recall(ids: list[int], task: Recall) -> list[int]:
    """Return the value of every key that is repeated, -1 elsewhere."""
    context = ids[: 2 * task.pairs]
    value_of = {key: context[i + 1] for i, key in enumerate(context) if i % 2 == 0}
    return [-1] * len(context) + [value_of.get(token, -1) for token in ids[2 * task.pairs :]]


def solve_registers(ids: list[int], task: Registers) -> list[int]:
    """Return what the register that the question names holds at the end, -1 before the question.

    With trained="operations", the last token of an operation has what its first register holds.
    Tokens are replaced by words first, and the operations that they name are done in turn.
    """
    values = [f"value {number}" for number in range(task.values)]
    registers = [f"register {number}" for number in range(task.registers)]
    words = [*values, *registers, "set", "swap", "ask"]
    *operations, question, queried_register = (words[token] for token in ids)
    holds = {}
    answers = []
    for operation, register, argument in zip(*[iter(operations)] * 3, strict=True):
        if operation == "set":
            holds[register] = argument
        else:
            assert operation == "swap"
            assert register != argument
            holds[register], holds[argument] = holds[argument], holds[register]
        answers += [-1, -1, -1]
        if task.trained == "operations":
            answers[-1] = words.index(holds[register])
    assert question == "ask"
    return [*answers, -1, words.index(holds[queried_register])]


class Case(NamedTuple):
    """A task, and what is known of its sequences."""

    task: Task
    solve: Callable[[list[int], Task], list[int]]
    num_targets: int
    num_answers: int

    # among how many ids a model guesses at the positions with targets
    num_guesses: int


CASES = [
    Case(Copy(5), solve_copy, 10, 5, 16),
    Case(Copy(4, 9, "answers"), solve_copy, 4, 4, 9),
    Case(Recall(7, 61, 30), solve_recall, 7, 7, 7),
    Case(Recall(2, 8, 8), solve_recall, 2, 2, 2),
    Case(Registers(3, 7, 5, 0.4), solve_registers, 1, 1, 5),
    Case(Registers(2, 9, 300, 1.0), solve_registers, 1, 1, 300),
    Case(Registers(4, 6, 5, 0.5, trained="operations"), solve_registers, 11, 1, 5),
]


@pytest.fixture(params=CASES, ids=lambda case: str(case.task))
def case(request) -> Case:
    return request.param


def draw_split(task: Task, split: str, count: int = 512, seed: int = 0) -> list[tuple[int, ...]]:
    """Return the ids of the first sequences of a split."""
    blocks = [task.draw_block(seed, split, number)[0] for number in range(-(-count // tasks.BLOCK))]
    return [tuple(ids) for ids in np.concatenate(blocks)[:count].tolist()]


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_every_target_is_the_answer(case, split):
    ids, targets = case.task.draw_block(3, split, 2)
    assert ids.shape == targets.shape == (tasks.BLOCK, case.task.seq_len)
    assert 0 <= ids.min() <= ids.max() < case.task.vocab_size
    for sequence_ids, sequence_targets in zip(ids.tolist(), targets.tolist()):
        assert sequence_targets == case.solve(sequence_ids, case.task)
    # otherwise micro-batches would have to be weighted
    assert ((targets != -1).sum(1) == case.num_targets).all()
    answers = targets[:, case.task.first_answer :]
    assert ((answers != -1).sum(1) == case.num_answers).all()


def draw(task: Task, count=20_000, seed=0) -> tuple[np.ndarray, np.ndarray]:
    return task.draw(np.random.default_rng(seed), count)


def assert_frequencies(counts: np.ndarray, probabilities: np.ndarray | None = None) -> None:
    """Assert that counts are within five deviations of the expected ones (default: uniform)."""
    if probabilities is None:
        probabilities = np.full(len(counts), 1 / len(counts))
    expected = counts.sum() * probabilities
    assert (abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()


# ---- distributions, as the authors of the tasks draw them ----


class DrawnRecall(NamedTuple):
    keys: np.ndarray  # (count, 3)
    values: np.ndarray  # (count, 3)
    queries: np.ndarray  # (count, 24), with 0 where there is none


@pytest.fixture(scope="module")
def drawn_recall() -> DrawnRecall:
    ids, _ = draw(Recall(3, 30, 12))
    return DrawnRecall(keys=ids[:, 0:6:2], values=ids[:, 1:6:2], queries=ids[:, 6:])


@pytest.mark.parametrize(("name", "first"), [("keys", 1), ("values", 7)])
def test_keys_and_values_of_recall_are_six_symbols_each_that_are_equally_likely(
    drawn_recall, name, first
):
    symbols = getattr(drawn_recall, name)
    assert all(len(set(row)) == 3 for row in symbols.tolist())
    assert_frequencies(np.bincount(symbols[:, 2] - first, minlength=6))


def test_queries_of_recall_have_slots_of_the_power_law(drawn_recall):
    """Draw three of 12 slots without replacement, slot g with a weight of g^-0.99."""
    weights = np.arange(1.0, 13) ** -0.99
    probabilities = np.zeros(12)
    for slots in itertools.permutations(range(12), 3):
        remaining_weight = weights.sum()
        probability = 1.0
        for slot in slots:
            probability = probability * weights[slot] / remaining_weight
            remaining_weight = remaining_weight - weights[slot]
        # each key is as likely in each of the three
        probabilities[list(slots)] += probability / 3
    for number in range(3):
        key = drawn_recall.keys[:, [number]]
        slots = np.argmax(drawn_recall.queries == key, axis=1) // 2
        assert_frequencies(np.bincount(slots, minlength=12), probabilities)


def test_answers_of_registers_are_equally_likely():
    _, targets = draw(Registers())
    assert_frequencies(np.bincount(targets[:, -1], minlength=8))


def test_every_register_is_set_first():
    ids, _ = draw(Registers(3, 2, 5), 500)
    assert (ids[:, 0:9:3] == 8).all()  # 0 to 4 are values, 5 to 7 registers, 8 is `set`
    assert (np.sort(ids[:, 1:9:3], axis=1) == [5, 6, 7]).all()
    assert_frequencies(np.bincount(ids[:, 1], minlength=8)[5:])


def test_swaps_have_the_given_probability():
    ids, _ = draw(Registers(3, 2, 5, 0.3))
    swaps = (ids[:, 9:15:3] == 9).sum()
    assert_frequencies(np.array([swaps, 40_000 - swaps]), np.array([0.3, 0.7]))


def test_the_partners_of_a_swap_are_equally_likely():
    ids, _ = draw(Registers(3, 1, 5, 1.0))
    pairs = 3 * (ids[:, 10] - 5) + ids[:, 11] - 5
    counts = np.bincount(pairs, minlength=9)
    assert_frequencies(np.delete(counts, [0, 4, 8]))  # no register is swapped with itself
    assert counts[[0, 4, 8]].sum() == 0


def test_symbols_to_copy_are_equally_likely():
    ids, _ = draw(Copy(3), 4000)
    assert (ids[:, 0] == 0).all()
    assert_frequencies(np.bincount(ids[:, 1:4].ravel(), minlength=17)[1:])


# ---- seeds and splits ----


@pytest.mark.parametrize("task", [Recall(7, 61, 30), Registers(3, 7, 5), Copy(8)], ids=str)
def test_sequences_are_different_and_a_function_of_seed_and_split(task):
    sequences = draw_split(task, "train")
    assert sequences == draw_split(task, "train")
    assert len(set(sequences)) == 512
    assert not set(sequences) & set(draw_split(task, "train", seed=1))
    assert not set(sequences) & set(draw_split(task, "val"))


def test_no_validation_sequence_is_in_training_where_there_are_few():
    task = Copy(3, 4)
    val, train = (set(draw_split(task, split, 3000)) for split in ("val", "train"))
    assert not train & val
    assert len(train | val) == 4**3
    assert len(val) == pytest.approx(4**3 / 8, rel=0.5)


# ---- batches ----


def test_a_batch_holds_consecutive_sequences_whatever_its_parts():
    task = Copy(3)
    batches = TaskTrainBatches(task, global_batch_size=100, seed=4)
    expected = draw_split(task, "train", 600, seed=4)
    ids = torch.cat([batches.get(step, 0, 100)[0] for step in range(6)])
    assert [tuple(sequence) for sequence in ids.tolist()] == expected
    for step, first, count in ((0, 0, 7), (2, 40, 60), (5, 99, 1)):
        ids, targets = batches.get(step, first, count)
        begin = 100 * step + first
        assert [tuple(sequence) for sequence in ids.tolist()] == expected[begin : begin + count]
        assert targets.tolist() == [solve_copy(sequence, task) for sequence in ids.tolist()]


def test_a_validation_batch_is_filled_up_with_padding():
    task = Recall(3, 12, 6)
    batches = TaskValidationBatches(task)
    ids, targets = batches.get([700, 2], 3)
    sequences = draw_split(task, "val", 1000)
    assert [tuple(sequence) for sequence in ids.tolist()] == [
        sequences[700],
        sequences[2],
        (0,) * 12,
    ]
    assert targets[:2].tolist() == [solve_recall(sequence, task) for sequence in ids[:2].tolist()]
    assert targets[2].eq(-1).all()
    assert batches.spread() == list(range(1000))


# ---- scores ----


class TableModel(torch.nn.Module):
    """A model whose logits are looked up by the current token."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def forward(self, ids, targets, return_logits=False):
        logits = self.table[ids]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits if return_logits else None, loss


@pytest.mark.parametrize("batch_size", [1, 4, 9])
def test_losses_are_means_over_targets_and_answers_are_counted(batch_size):
    """Sequences have different numbers of targets, number 3 has no answer, and number 5 no target."""
    generator = np.random.default_rng(0)
    ids = torch.from_numpy(generator.integers(0, 4, (9, 5)))
    targets = torch.from_numpy(generator.integers(-1, 4, (9, 5)))
    targets[3, 2:] = -1
    targets[5] = -1

    def get(sequences, size):
        rows = [*sequences, *[5] * (size - len(sequences))]  # number 5 serves as padding
        return ids[rows], targets[rows]

    model = TableModel()
    scores = evaluate(
        model,
        SimpleNamespace(get=get, scored=torch.arange(5) >= 2),
        list(range(9)),
        batch_size,
        World(0, 1, torch.device("cpu")),
        contextlib.nullcontext(),
    )
    losses = []
    answers = []
    for row_ids, row_targets in zip(ids.tolist(), targets.tolist()):
        table = model.table[row_ids].double()
        log_probabilities = table.log_softmax(1)
        losses += [-log_probabilities[i, t].item() for i, t in enumerate(row_targets) if t >= 0]
        is_right = [
            table[i].argmax().item() == t for i, t in enumerate(row_targets) if t >= 0 and i >= 2
        ]
        if is_right:
            answers.append(is_right)
    assert scores["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert scores["accuracy"] == pytest.approx(np.mean(np.concatenate(answers)))
    assert scores["exact_match"] == pytest.approx(np.mean([all(row) for row in answers]))
    assert len(answers) == 7


def test_chance_and_optimum_are_those_of_a_guess_and_of_the_answers(case):
    task = case.task
    assert task.chance == pytest.approx((np.log(case.num_guesses), 1 / case.num_guesses))
    # the first half of a copy cannot be predicted
    is_half_random = isinstance(task, Copy) and task.trained == "all"
    optimal_loss = task.chance.loss / 2 if is_half_random else 0.0
    assert task.optimum == (optimal_loss, 1.0)


# ---- the scripts ----


def prepare(out: Path, name: str, *options: str) -> Path:
    """Run the script of a task, and return the folder that it writes."""
    result = call(f"data/{name}/prepare.py", f"--out={out}", *options)
    assert result.returncode == 0, result.stderr.decode()
    return out


def test_meta_json_describes_the_task(tmp_path):
    corpus = open_corpus(str(prepare(tmp_path, "recall", "--pairs=3", "--symbols=8")))
    assert corpus.meta == {
        "task": "recall",
        "difficulty": {"pairs": 3, "positions": 48, "symbols": 8},
        "tokenizer": "ids",
        "vocab_size": 9,
        "block_size": 48,
        "chance": {"loss": pytest.approx(np.log(3)), "accuracy": pytest.approx(1 / 3)},
        "optimum": {"loss": 0.0, "accuracy": 1.0},
    }
    assert corpus.identity == corpus.meta
    assert corpus.bytes_per_token("val") is None  # ids stand for no bytes
    batches = open_validation_batches(corpus, 48)
    ids, _ = batches.get([0], 1)
    assert tuple(ids[0].tolist()) == draw_split(Recall(3, 48, 8), "val", 1)[0]


MISTAKES = [
    ("registers", "--values=1", "--values=1: give a number at least 2"),
    ("recall", "--pairs=17", "--positions=48 is too few for 17 pairs and their queries; give 68"),
    ("recall", "--symbols=14", "--symbols=14 is too few for 8 pairs of a key and a value; give 16"),
    ("recall", "--symbols=33", "--symbols=33 is odd"),
    ("copy_task", "--half=1 --symbols=2", "has too few different sequences for both splits"),
]


@pytest.mark.parametrize(("name", "options", "message"), MISTAKES)
def test_mistakes_end_in_one_line_with_nothing_written(
    tmp_path, monkeypatch, name, options, message
):
    monkeypatch.setattr(tasks, "MAX_DRAWS", 20)
    if "few different" in message:
        monkeypatch.setattr(tasks, "VAL_DIVISOR", 2**40)
    out = tmp_path / "out"
    line = one_line_error(call(f"data/{name}/prepare.py", *options.split(), f"--out={out}"))
    assert message in line
    assert not out.exists()


def test_the_shards_of_another_corpus_are_kept(tmp_path):
    (tmp_path / "x_train_0.bin").touch()
    line = one_line_error(call("data/recall/prepare.py", f"--out={tmp_path}"))
    assert f"{tmp_path} holds the shards of another corpus; give another --out" in line
    assert [path.name for path in tmp_path.iterdir()] == ["x_train_0.bin"]


# ---- a run on a task ----


class TaskRun(NamedTuple):
    folder: Path
    corpus: Path
    output: bytes
    scores: dict  # the last line of metrics.jsonl


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TaskRun:
    """Train six steps on recall."""
    folder = tmp_path_factory.mktemp("recall")
    corpus = prepare(folder / "data", "recall", "--pairs=3", "--positions=16", "--symbols=20")
    result = call("train.py", *small_run(corpus, folder / "run", eval_full=True))
    assert result.returncode == 0, result.stderr.decode()
    scores = metrics.read(folder / "run" / "metrics.jsonl")[-1]
    return TaskRun(folder / "run", corpus, result.stdout, scores)


def test_a_run_is_scored_without_bits_per_byte(run):
    assert run.scores["val_sequences"] == 1000
    assert 0 <= run.scores["val_exact_match"] <= run.scores["val_accuracy"] < 1
    assert b"the sequences of every step are new" in run.output
    assert b"bits per byte" not in run.output
    assert "val_bits_per_byte" not in run.scores


def test_a_run_is_evaluated_on_its_validation_split(run):
    result = call("eval.py", run.folder, "--val", "--dtype=float32", "--device=cpu")
    assert result.returncode == 0, result.stderr.decode()
    [file] = (run.folder / "eval").glob("results_*.json")
    record = json.loads(file.read_text())["validation"]
    for key in ("val_loss", "val_accuracy", "val_exact_match"):
        assert record[key] == pytest.approx(run.scores[key], rel=1e-5)
    table = (run.folder / "eval" / "table.md").read_text()
    assert f"{run.scores['val_accuracy']:.4f}" in table
    assert "bits per byte" not in table


@pytest.mark.parametrize(
    ("script", "argument"),
    [("eval.py", "--tasks=lambada_openai"), ("export.py", "{out}"), ("sample.py", "--prompt=3 14")],
)
def test_a_run_on_ids_is_not_used_for_text(run, tmp_path, script, argument):
    out = tmp_path / "exported"
    line = one_line_error(call(script, run.folder, argument.format(out=out)))
    assert re.search("tokens (of this model )?are (the )?ids", line)
    assert not out.exists()


@pytest.mark.parametrize(
    "option", ["recall --positions=50", "registers --operations=3", "copy_task"]
)
def test_the_config_fits_every_difficulty(tmp_path, option):
    name, *options = option.split()
    corpus = prepare(tmp_path, name, *options)
    config_file = str(ROOT / "config" / f"{name}_cpu.py")
    config, model_config = configure([config_file, f"--dataset={corpus}"])
    open_data(config, model_config)
    meta = open_corpus(str(corpus)).meta
    assert model_config.block_size == meta["block_size"]
    assert model_config.vocab_size == -(-meta["vocab_size"] // 64) * 64
    config, model_config = configure([config_file, f"--dataset={corpus}", "--block_size=99"])
    with pytest.raises(ValueError, match="block_size=99, but the sequences"):
        open_data(config, model_config)
