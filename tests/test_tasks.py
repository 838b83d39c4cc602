"""Test the synthetic tasks: plain Python solves their sequences and finds the same answers."""

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, configure, one_line_error, small_run
from in_process import call

from data import tasks
from data.copy_task.prepare import Copies
from data.loader import ValidationBatches
from data.recall.prepare import Recall
from data.registers.prepare import Registers
from data.sequences import SequenceLayout
from data.shards import Corpus, open_corpus
from training import metrics
from training.batches import open_data
from training.validation import evaluate
from utils.processes import World


def solve_recall(ids: list[int], task: Recall) -> list[int]:
    """Return the value of every key that is repeated, 0 elsewhere."""
    context = ids[: 2 * task.pairs]
    value_of = {key: context[i + 1] for i, key in enumerate(context) if i % 2 == 0}
    return [0] * len(context) + [value_of.get(token, 0) for token in ids[2 * task.pairs :]]


def solve_registers(ids: list[int], task: Registers) -> list[int]:
    """Return what the register that the question names holds at the end, 0 before the question.

    With trained="swaps", the last token of a swap has what its first register holds after it.
    Tokens are replaced by words first, and the operations that they name are done in turn.
    """
    values = [f"value {number}" for number in range(1, task.values + 1)]
    registers = [f"register {number}" for number in range(1, task.registers + 1)]
    words = ["", *values, *registers, "set", "swap", "ask"]
    *operations, question, queried_register = (words[token] for token in ids)
    holds = {}
    answers = []
    for operation, register, argument in zip(*[iter(operations)] * 3, strict=True):
        answers += [0, 0, 0]
        if operation == "set":
            holds[register] = argument
        else:
            assert operation == "swap"
            assert register != argument
            holds[register], holds[argument] = holds[argument], holds[register]
            if task.trained == "swaps":
                answers[-1] = words.index(holds[register])
    assert question == "ask"
    return [*answers, 0, words.index(holds[queried_register])]


RECALL = Recall(7, 61, 30)
REGISTERS = Registers(3, 7, 5, 0.4)
SOLVED = [
    (RECALL, solve_recall),
    (REGISTERS, solve_registers),
    (Recall(2, 8, 8), solve_recall),
    (Registers(2, 9, 300, 1.0), solve_registers),
    (Registers(4, 6, 5, 1.0, "swaps"), solve_registers),
]


class PreparedTask(NamedTuple):
    task: tasks.Task
    corpus: Corpus
    val: np.ndarray  # documents (count, window_tokens)
    train: np.ndarray


def prepare(out: Path, task: tasks.Task, *options: str) -> PreparedTask:
    """Run the preparation script of a task, and read the corpus that it writes."""
    keys = [f"--{key}={value}" for key, value in vars(task).items()]
    result = call(f"data/{task.name}/prepare.py", f"--out={out}", *keys, *options)
    assert result.returncode == 0, result.stderr.decode()
    corpus = open_corpus(str(out))
    window_tokens = corpus.meta["window_tokens"]
    return PreparedTask(
        task,
        corpus,
        val=np.concatenate(corpus.val).reshape(-1, window_tokens),
        train=np.concatenate(corpus.train).reshape(-1, window_tokens),
    )


class SolvedTask(NamedTuple):
    prepared: PreparedTask
    solve: Callable[[list[int], tasks.Task], list[int]]


@pytest.fixture(scope="module", params=SOLVED, ids=lambda solved: str(solved[0]))
def solved_task(request, tmp_path_factory) -> SolvedTask:
    task, solve = request.param
    out = tmp_path_factory.mktemp("task")
    prepared = prepare(out, task, "--sequences=60", "--val_sequences=30", "--shard_tokens=777")
    return SolvedTask(prepared, solve)


def test_every_label_is_the_answer(solved_task):
    prepared, solve = solved_task
    half = prepared.corpus.meta["window_tokens"] // 2
    for document in [*prepared.val.tolist(), *prepared.train.tolist()]:
        assert document[half + 1 :] == solve(document[1:half], prepared.task)


def test_every_document_begins_with_end_of_text_and_no_label(solved_task):
    prepared, _ = solved_task
    task = prepared.task
    meta = prepared.corpus.meta
    half = meta["window_tokens"] // 2
    assert meta["eot_token"] == task.vocab_size - 1
    assert half == task.positions + 1
    assert (len(prepared.val), len(prepared.train)) == (30, 60)
    documents = np.concatenate([prepared.val, prepared.train])
    assert (documents[:, 0] == meta["eot_token"]).all()
    assert (documents[:, half] == 0).all()


def test_meta_names_the_difficulty_and_counts_tokens_and_no_bytes(solved_task):
    prepared, _ = solved_task
    corpus = prepared.corpus
    num_tokens = 60 * corpus.meta["window_tokens"]
    assert corpus.meta["train"] == {"documents": 60, "tokens": num_tokens}
    assert corpus.bytes_per_token("val") is None  # ids stand for no bytes
    assert corpus.meta["difficulty"] == vars(prepared.task)


def test_every_sequence_trains_and_scores_as_many_positions(solved_task):
    prepared, _ = solved_task
    task = prepared.task
    num_trained = {
        "recall": lambda: task.pairs,
        "registers": lambda: 7 if task.trained == "swaps" else 1,  # six swaps and the question
    }[task.name]()
    num_scored = 1 if task.name == "registers" else num_trained
    layout = SequenceLayout.from_meta(prepared.corpus.meta)
    _, targets = layout.ids_and_targets(prepared.train)
    assert (targets != -1).sum(1).eq(num_trained).all()
    assert ((targets != -1) & layout.mask(layout.scored)).sum(1).eq(num_scored).all()


def draw(task: tasks.Task, count=20_000, seed=0) -> tuple[np.ndarray, np.ndarray]:
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


def test_keys_and_values_of_recall_are_separate_symbols(drawn_recall):
    assert (drawn_recall.keys.min(), drawn_recall.keys.max()) == (1, 6)
    assert (drawn_recall.values.min(), drawn_recall.values.max()) == (7, 12)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_keys_and_values_of_recall_differ_and_are_equally_likely(drawn_recall, name):
    symbols = getattr(drawn_recall, name)
    assert all(len(set(row)) == 3 for row in symbols.tolist())
    assert_frequencies(np.bincount(symbols[:, 2])[symbols.min() :])


def test_every_key_of_recall_is_queried_once(drawn_recall):
    positions = [np.flatnonzero(row) for row in drawn_recall.queries]
    assert all(len(row) == 3 and (row % 2 == 0).all() for row in positions)
    queried_keys = np.sort(drawn_recall.queries, axis=1)[:, -3:]
    assert (queried_keys == np.sort(drawn_recall.keys, axis=1)).all()


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


def test_labels_of_registers_are_equally_likely():
    _, labels = draw(Registers())
    assert_frequencies(np.bincount(labels[:, -1])[1:])


def test_every_register_is_set_first():
    ids, _ = draw(Registers(3, 2, 5), 500)
    assert (ids[:, 0:9:3] == 9).all()  # 1 to 5 are values, 6 to 8 registers, 9 is `set`
    assert (np.sort(ids[:, 1:9:3], axis=1) == [6, 7, 8]).all()
    assert_frequencies(np.bincount(ids[:, 1], minlength=9)[6:])


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_swaps_have_the_given_probability(probability):
    ids, _ = draw(Registers(3, 2, 5, probability))
    swaps = (ids[:, 9:15:3] == 10).sum()
    assert_frequencies(np.array([swaps, 40_000 - swaps]), np.array([probability, 1 - probability]))


def test_the_partners_of_a_swap_are_equally_likely():
    ids, _ = draw(Registers(3, 1, 5, 1.0))
    pairs = 3 * (ids[:, 10] - 6) + ids[:, 11] - 6
    counts = np.bincount(pairs, minlength=9)
    assert_frequencies(np.delete(counts, [0, 4, 8]))  # no register is swapped with itself
    assert counts[[0, 4, 8]].sum() == 0


def test_registers_without_swaps_are_as_easy_as_the_docstring_says():
    """Answer with the last value that was assigned to the register by its name."""
    task = Registers()
    ids, labels = draw(task, 4000)
    answers = np.zeros(len(ids), dtype=np.int64)
    for position in range(0, task.positions - 2, 3):
        names_asked = (ids[:, position] == task.set_id) & (ids[:, position + 1] == ids[:, -1])
        answers[names_asked] = ids[names_asked, position + 2]
    assert (answers == labels[:, -1]).mean() == pytest.approx(0.50, abs=0.02)


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> PreparedTask:
    out = tmp_path_factory.mktemp("copies")
    return prepare(out, Copies(5), "--sequences=600", "--val_sequences=70", "--shard_tokens=1000")


def test_second_halves_repeat_the_first_after_end_of_text(copies):
    documents = np.concatenate([copies.val, copies.train])
    assert (documents[:, 0] == copies.corpus.meta["eot_token"]).all()
    assert (documents[:, 1:6] == documents[:, 6:]).all()
    assert (len(copies.val), len(copies.train)) == (70, 600)
    assert copies.corpus.meta["train"]["tokens"] == 600 * 11


def test_copies_are_drawn_from_16_symbols(copies):
    documents = np.concatenate([copies.val, copies.train])
    assert set(documents[:, 1:].ravel().tolist()) == set(b"abcdefghijklmnop")
    assert len(np.unique(documents, axis=0)) > 660  # of a million
    assert_frequencies(np.bincount(copies.train[:, 1:6].ravel())[ord("a") :])


def test_meta_describes_the_copy_task(copies):
    expected = {
        "window_tokens": 11,
        "scored": [[5, 10]],
        "chance": {"loss": np.log(16), "accuracy": 1 / 16},
        "optimum": {"loss": np.log(16) / 2, "accuracy": 1.0},
    }
    assert expected.items() <= copies.corpus.meta.items()


@pytest.fixture(scope="module")
def copies_of_answers(tmp_path_factory) -> PreparedTask:
    """Prepare the copy task with targets in the second half alone."""
    out = tmp_path_factory.mktemp("answers") / "out"
    return prepare(out, Copies(5, trained="answers"), "--sequences=600", "--val_sequences=70")


def test_answers_alone_are_trained(copies_of_answers):
    corpus = copies_of_answers.corpus
    layout = SequenceLayout.from_meta(corpus.meta)
    ids, targets = ValidationBatches(corpus.val, 10, 257, layout).get([0, 69], 2)
    documents = copies_of_answers.val[[0, 69]]
    assert targets[:, :5].eq(-1).all()
    assert (targets[:, 5:].numpy() == documents[:, 6:]).all()
    assert (ids.numpy() == documents[:, :-1]).all()
    assert corpus.meta["optimum"] == {"loss": 0.0, "accuracy": 1.0}


def test_the_copy_task_with_other_targets_is_another_preparation(tmp_path):
    """The shards would be the same, but a model learns something else from them."""
    prepare(tmp_path, Copies(5, trained="answers"), "--sequences=600", "--val_sequences=70")
    result = call(
        "data/copy_task/prepare.py",
        f"--out={tmp_path}",
        "--half=5",
        "--sequences=600",
        "--val_sequences=70",
    )
    assert "holds a corpus that was prepared with other options" in one_line_error(result)


# ---- seeds and splits ----

DRAWN_TASKS = [RECALL, REGISTERS, Copies(5)]


def read_texts(task, count: int, seed: int, split: str) -> list:
    batches = tasks.generate(task, count, seed, split).read()
    return [text for batch in batches for text in batch.texts]


@pytest.mark.parametrize("task", DRAWN_TASKS, ids=str)
def test_sequences_are_different_and_a_function_of_the_seed(task):
    texts = read_texts(task, 600, 0, "train")
    assert texts == read_texts(task, 600, 0, "train")
    assert len(set(texts)) == 600


@pytest.mark.parametrize("task", DRAWN_TASKS, ids=str)
@pytest.mark.parametrize(("seed", "split"), [(1, "train"), (0, "val")])
def test_another_seed_or_split_has_other_sequences(task, seed, split):
    texts = set(read_texts(task, 600, seed, split))
    assert not texts & set(read_texts(task, 600, 0, "train"))


@pytest.mark.parametrize("task", DRAWN_TASKS, ids=str)
def test_parts_of_the_sequences_are_those_of_all(task):
    texts = read_texts(task, 600, 0, "train")
    assert read_texts(task, 300, 0, "train") == texts[:300]


def test_no_validation_sequence_is_in_training_where_there_are_few():
    task = Copies(3, 4)
    count = 4**3
    val, train = (set(read_texts(task, 3000, 0, split)) for split in ("val", "train"))
    assert not train & val
    assert len(train | val) == count
    assert len(val) == pytest.approx(count / 8, rel=0.5)


# ---- chance and optimum ----


class UniformModel(torch.nn.Module):
    """A model for which the ids that `candidates` returns for a position are equally likely."""

    def __init__(self, vocab_size, candidates):
        super().__init__()
        self.vocab_size = vocab_size
        self.candidates = candidates

    def forward(self, ids, targets, return_logits=False):
        logits = torch.full((*ids.shape, self.vocab_size), -60.0)
        for row, sequence in enumerate(ids.tolist()):
            for position, candidate_ids in enumerate(self.candidates(sequence[1:]), 1):
                logits[row, position, candidate_ids] = 0.0
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits if return_logits else None, loss


# the candidates of a model that does not solve the task
BLIND_CANDIDATES = {
    "recall": lambda ids: [ids[1:14:2]] * len(ids),  # the values of the sequence
    "registers": lambda ids: [[1, 2, 3, 4, 5]] * len(ids),  # the values
}


def evaluate_candidates(prepared: PreparedTask, candidates) -> dict:
    task = prepared.task
    layout = SequenceLayout.from_meta(prepared.corpus.meta)
    return evaluate(
        UniformModel(task.vocab_size, candidates),
        ValidationBatches(prepared.corpus.val, task.positions + 1, task.vocab_size, layout),
        list(range(40)),
        8,
        World(0, 1, torch.device("cpu")),
        contextlib.nullcontext(),
    )


@pytest.mark.parametrize(("task", "solve"), SOLVED[:2], ids=BLIND_CANDIDATES)
def test_the_optimum_is_that_of_meta_json(tmp_path, task, solve):
    prepared = prepare(tmp_path, task, "--sequences=10", "--val_sequences=40")
    scores = evaluate_candidates(prepared, lambda ids: [[answer] for answer in solve(ids, task)])
    optimum = prepared.corpus.meta["optimum"]
    assert scores.pop("loss") == pytest.approx(optimum["loss"], abs=1e-6)
    assert scores == {"accuracy": 1.0, "exact_match": 1.0}


@pytest.mark.parametrize("task", [RECALL, REGISTERS], ids=BLIND_CANDIDATES)
def test_chance_is_that_of_meta_json(tmp_path, task):
    candidates = BLIND_CANDIDATES[task.name]
    prepared = prepare(tmp_path, task, "--sequences=10", "--val_sequences=40")
    chance = prepared.corpus.meta["chance"]
    loss = evaluate_candidates(prepared, candidates)["loss"]
    assert loss == pytest.approx(chance["loss"], rel=1e-5)
    num_candidates = len(candidates([1] * task.positions)[-1])
    assert chance["accuracy"] == pytest.approx(1 / num_candidates)


# ---- mistakes ----

BOUNDS = {
    "recall": "pairs=1 positions=7 symbols=2 sequences=0 val_sequences=0 seed=-1",
    "copy_task": "half=0 symbols=65 shard_tokens=0",
    "registers": "registers=1 operations=-1 values=1 swap_probability=-1.0",
}
MISTAKES = [
    *(
        (name, f"--{option}", f"{option}: give")
        for name, options in BOUNDS.items()
        for option in options.split()
    ),
    ("recall", "--pairs=17", "--positions=48 is too few for 17 pairs and their queries; give 68"),
    ("recall", "--symbols=14", "--symbols=14 is too few for 8 pairs of a key and a value; give 16"),
    ("recall", "--symbols=33", "--symbols=33 is odd"),
    ("recall", "--tokenizer=bytes", "unknown key --tokenizer"),
]


def assert_refused(task: str, options: str, message: str, out: Path) -> None:
    """Assert that preparing a task ends in one line, and that nothing is written."""
    line = one_line_error(call(f"data/{task}/prepare.py", *options.split(), f"--out={out}"))
    assert message in line
    assert not out.exists()


def test_too_few_tokens_are_answered_with_options_that_the_script_has(tmp_path):
    options = ["--max_tokens=500", "--sequences=300", "--val_sequences=300", f"--out={tmp_path}"]
    line = one_line_error(call("data/recall/prepare.py", *options))
    assert "leave nothing for training; give more text, or other numbers of tokens" in line


@pytest.mark.parametrize(("task", "options", "message"), MISTAKES)
def test_mistakes_end_in_one_line_with_nothing_written(
    tmp_path, monkeypatch, task, options, message
):
    monkeypatch.setattr(tasks, "MAX_DRAWS", 20)
    assert_refused(task, options, message, tmp_path / "out")


def test_too_few_sequences_for_both_splits_are_refused(tmp_path, monkeypatch):
    """With this VAL_DIVISOR, hardly any sequence belongs to the validation split."""
    monkeypatch.setattr(tasks, "MAX_DRAWS", 20)
    monkeypatch.setattr(tasks, "VAL_DIVISOR", 2**40)
    message = "there are too few different sequences for both splits; give a larger half"
    assert_refused("copy_task", "--half=1 --symbols=2", message, tmp_path / "out")


# ---- a run on a task ----


class TaskRun(NamedTuple):
    folder: Path
    corpus: Path
    output: bytes

    def read_last_record(self) -> dict:
        return metrics.read(self.folder / "metrics.jsonl")[-1]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TaskRun:
    """Train six steps on recall."""
    folder = tmp_path_factory.mktemp("recall")
    prepare(folder / "data", Recall(3, 15, 20), "--sequences=200", "--val_sequences=20")
    result = call("train.py", *small_run(folder / "data", folder / "run", eval_full=True))
    assert result.returncode == 0, result.stderr.decode()
    return TaskRun(folder / "run", folder / "data", result.stdout)


def test_a_run_is_scored_without_bits_per_byte(run):
    last = run.read_last_record()
    assert last["val_sequences"] == 20
    assert 0 <= last["val_exact_match"] <= last["val_accuracy"] < 1
    assert b"bits per byte" not in run.output
    assert "val_bits_per_byte" not in last


def test_a_resumed_run_takes_its_sizes_from_the_run(run, tmp_path):
    out = shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "step_00000006")
    saved_keys = ("--block_size", "--vocab_size", "--eval_full")
    arguments = [key for key in small_run(run.corpus, out) if not key.startswith(saved_keys)]
    result = call("train.py", *arguments, "--resume=auto")
    assert result.returncode == 0, result.stderr.decode()
    resumed = metrics.read(out / "metrics.jsonl")[-1]
    assert resumed["val_loss"] == run.read_last_record()["val_loss"]


def test_a_run_is_evaluated_on_its_validation_split(run):
    result = call("eval.py", run.folder, "--val", "--dtype=float32", "--device=cpu")
    assert result.returncode == 0, result.stderr.decode()
    [file] = (run.folder / "eval").glob("results_*.json")
    record = json.loads(file.read_text())["validation"]
    last = run.read_last_record()
    assert record["val_loss"] == pytest.approx(last["val_loss"], rel=1e-5)
    assert record["val_accuracy"] == last["val_accuracy"]
    assert record["val_exact_match"] == last["val_exact_match"]
    table = (run.folder / "eval" / "table.md").read_text()
    assert f"{last['val_accuracy']:.4f}" in table
    assert "bits per byte" not in table


def test_a_run_on_ids_is_not_evaluated_on_texts(run):
    line = one_line_error(call("eval.py", run.folder, "--tasks=lambada_openai"))
    assert "the tokens of this model are ids, not text" in line
    assert "--val" in line


def test_a_run_on_ids_is_not_exported(run, tmp_path):
    line = one_line_error(call("export.py", run.folder, tmp_path / "exported"))
    assert "its tokens are ids, not text" in line
    assert not (tmp_path / "exported").exists()


SAMPLE_OPTIONS = ("--temperature=0", "--max_new_tokens=1", "--device=cpu")


def test_samples_are_numbers(run):
    result = call("sample.py", run.folder, "--prompt=3 14 5 17 3", *SAMPLE_OPTIONS)
    assert result.returncode == 0, result.stderr.decode()
    tokens = result.stdout.decode().split()
    assert tokens[:5] == ["3", "14", "5", "17", "3"]
    assert all(token.isdecimal() or token == "<|endoftext|>" for token in tokens)


@pytest.mark.parametrize("prompt", ["def", "3 21", "-1"])
def test_a_prompt_that_is_no_token_is_refused(run, prompt):
    line = one_line_error(call("sample.py", run.folder, f"--prompt={prompt}", *SAMPLE_OPTIONS))
    assert (
        "is not a token, because the tokens of this model are ids; give numbers from 0 to 20"
        in line
    )


DIFFICULTIES = {
    "recall": "--positions=50",
    "registers": "--operations=3",
}


@pytest.fixture(scope="module", params=DIFFICULTIES.items(), ids=DIFFICULTIES)
def difficult_corpus(request, tmp_path_factory) -> tuple[str, Path]:
    """Prepare a task with another difficulty; return the task's config file and the corpus."""
    name, option = request.param
    folder = tmp_path_factory.mktemp(name)
    result = call(f"data/{name}/prepare.py", f"--out={folder}", option, "--sequences=300")
    assert result.returncode == 0, result.stderr.decode()
    return str(ROOT / "config" / f"{name}_cpu.py"), folder


def test_the_config_fits_every_difficulty(difficult_corpus):
    config_file, corpus = difficult_corpus
    config, model_config = configure([config_file, f"--dataset={corpus}"])
    open_data(config, model_config)
    meta = open_corpus(str(corpus)).meta
    assert model_config.block_size == meta["window_tokens"] // 2
    assert model_config.vocab_size == -(-meta["vocab_size"] // 64) * 64


def test_another_block_size_than_that_of_the_documents_is_refused(difficult_corpus):
    config_file, corpus = difficult_corpus
    config, model_config = configure([config_file, f"--dataset={corpus}", "--block_size=99"])
    with pytest.raises(ValueError, match="block_size=99, but the sequences"):
        open_data(config, model_config)
