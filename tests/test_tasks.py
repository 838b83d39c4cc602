"""The synthetic tasks, each answered anew from the tokens of its windows by plain Python."""

import contextlib
import itertools
import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, one_line_error, small_run
from in_process import call
from sympy.combinatorics import Permutation

from data import tasks
from data.copy_task.prepare import Copies
from data.k_hop.prepare import Hops
from data.loader import ValidationBatches
from data.permutations.prepare import Words, products
from data.recall.prepare import Recall
from data.sequences import SequenceLayout
from data.shards import open_corpus
from training import metrics
from training.distributed import World
from training.settings import configure
from training.setup import open_data
from training.validation import evaluate


def answers_of_recall(ids: list[int], task: Recall) -> list[int]:
    """The value of every key that comes again; 0 elsewhere."""
    context = ids[: 2 * task.pairs]
    value_of = {key: context[i + 1] for i, key in enumerate(context) if i % 2 == 0}
    return [0] * len(context) + [value_of.get(token, 0) for token in ids[2 * task.pairs :]]


def answers_of_hops(ids: list[int], task: Hops) -> list[int]:
    """The symbol after as many hops as the first token names, each to what followed last time; 0 in
    the first half.
    """
    hops, answers = ids[0] - task.symbols, []
    assert task.fewest <= hops <= task.hops
    for place in range(len(ids)):
        for _ in range(hops):
            earlier = [j for j in range(place) if ids[j] == ids[place]]
            place = earlier[-1] + 1 if earlier else None
            if place is None:
                break
        answers.append(None if place is None else ids[place])
    half = len(ids) - len(ids) // 2
    return [0] * half + answers[half:]


def answers_of_words(ids: list[int], task: Words) -> list[int]:
    """Products of tuples; the later one acts first."""
    elements = sorted(itertools.permutations(range(task.degree)))
    product, answers = elements[0], []
    for token in ids:
        product = tuple(product[i] for i in elements[token - 1])
        answers.append(1 + elements.index(product))
    return answers


RECALL, HOPS, WORDS = Recall(7, 61, 30), Hops(3, 1, 51, 4), Words(8, 5)
SOLVED = [(RECALL, answers_of_recall), (HOPS, answers_of_hops), (WORDS, answers_of_words)]
SOLVED += [(Recall(2, 8, 8), answers_of_recall), (Words(6, 2), answers_of_words)]
IDS = [str(task) for task, _ in SOLVED]


def prepared(out, task, *arguments):
    """The corpus that the task's script makes, and documents (count, window_tokens) by split."""
    keys = [f"--{key}={value}" for key, value in vars(task).items()]
    made = call(f"data/{task.name}/prepare.py", f"--out={out}", *keys, *arguments)
    assert made.returncode == 0, made.stderr.decode()
    corpus = open_corpus(str(out))
    parts = {"val": corpus.val, "train": corpus.train}
    size = corpus.meta["window_tokens"]
    return corpus, {name: np.concatenate(part).reshape(-1, size) for name, part in parts.items()}


@pytest.mark.parametrize(("task", "solve"), SOLVED, ids=IDS)
def test_every_label_is_the_answer(tmp_path, task, solve):
    options = ("--sequences=60", "--val_sequences=30", "--shard_tokens=777")
    corpus, documents = prepared(tmp_path, task, *options)
    eot, half = corpus.meta["eot_token"], corpus.meta["window_tokens"] // 2
    assert (eot, half) == (task.vocab_size - 1, task.positions + 1)
    for document in [*documents["val"].tolist(), *documents["train"].tolist()]:
        assert (document[0], document[half]) == (eot, 0)
        assert document[half + 1 :] == solve(document[1:half], task)
    assert {split: len(found) for split, found in documents.items()} == {"val": 30, "train": 60}
    # ids stand for no bytes
    assert corpus.meta["train"] == {"documents": 60, "tokens": 60 * 2 * half}
    assert corpus.bytes_per_token("val") is None
    layout, size = SequenceLayout.from_meta(corpus.meta), task.positions
    _, targets = layout.ids_and_targets(documents["train"])
    trained = {"k_hop": size // 2, "permutations": size}.get(task.name) or task.pairs
    scored = trained - (task.name == "permutations")  # whose first product is the first token
    assert (targets != -1).sum(1).eq(trained).all()  # of every window as many
    assert ((targets != -1) & layout.mask(layout.scored)).sum(1).eq(scored).all()
    assert corpus.meta["difficulty"] == vars(task)


def drawn(task, count=20_000, seed=0):
    return task.draw(np.random.default_rng(seed), count)


def assert_as_likely(counts, shares=None):
    """Within five deviations of the expected counts."""
    shares = np.full(len(counts), 1 / len(counts)) if shares is None else shares
    expected = counts.sum() * shares
    assert (abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()


def test_windows_of_recall_are_as_its_authors_draw_them():
    task = Recall(3, 30, 12)
    ids, _ = drawn(task)
    keys, values = ids[:, 0:6:2], ids[:, 1:6:2]
    assert (keys.min(), keys.max(), values.min(), values.max()) == (1, 6, 7, 12)
    for each in (keys, values):
        assert all(len(set(row)) == 3 for row in each.tolist())
        assert_as_likely(np.bincount(each[:, 2])[each.min() :])
    queries = [np.flatnonzero(row) for row in ids[:, 6:]]
    assert all(len(places) == 3 and (places % 2 == 0).all() for places in queries)
    # every key once more
    assert (np.sort(ids[:, 6:], axis=1)[:, -3:] == np.sort(keys, axis=1)).all()
    # Slot g of 12 has a weight of g^-0.99, drawn without replacement, each key as likely in each of
    # the three.
    weights = np.arange(1.0, 13) ** -0.99
    shares = np.zeros(12)
    for draws in itertools.permutations(range(12), 3):
        left, chance = weights.sum(), 1.0
        for slot in draws:
            chance, left = chance * weights[slot] / left, left - weights[slot]
        shares[list(draws)] += chance / 3
    for key in range(3):
        slots = np.argmax(ids[:, 6:] == keys[:, [key]], axis=1) // 2
        assert_as_likely(np.bincount(slots, minlength=12), shares)


def test_windows_of_hops_are_as_its_authors_draw_them():
    ids, labels = drawn(Hops(1, 1, 40, 4))
    assert (ids[:, 1:] != ids[:, :-1]).all()
    assert set(np.unique(ids[:, 1:])) == {1, 2, 3, 4}
    assert ((labels > 0) == (np.arange(40) >= 20)).all()
    assert (labels[:, 20:] != ids[:, 20:]).all()  # one hop never ends on its own symbol
    assert_as_likely(np.bincount(ids[:, 1])[1:])
    ids, labels = drawn(Hops(2, 2, 128, 8), 500)
    # as the docstring has it
    assert (labels[:, 64:] == ids[:, 64:]).mean() == pytest.approx(2 / 8, abs=0.02)


def test_what_the_last_token_tells_of_four_hops():
    """As the docstring has it: the best guess by the number of hops and the last token, whose
    symbols are alike.
    """
    ids, labels = drawn(Hops(4, 1, 64, 4), 4000)
    hops, right = ids[:, 0] - 4, []
    assert_as_likely(np.bincount(hops)[1:])
    for number in range(1, 5):
        own = (labels[hops == number, 32:] == ids[hops == number, 32:]).mean()
        right.append(max(own, (1 - own) / 3))
    assert np.mean(right) == pytest.approx(0.37, abs=0.01)


@pytest.mark.parametrize("task", [Hops(3, 1, 60, 4), Words(6, 3)], ids=str)
def test_every_label_is_as_likely(task):
    _, labels = drawn(task)
    assert_as_likely(np.bincount(labels[:, -1])[1:])


def test_products_are_those_of_a_library():
    elements = sorted(itertools.permutations(range(4)))
    table = products(4)
    for p, first in enumerate(elements):
        for q, second in enumerate(elements):  # sympy's product lets the left one act first
            assert table[p, q] == (Permutation(second) * Permutation(first)).rank()


def test_second_halves_repeat_the_first(tmp_path):
    options = ("--sequences=600", "--val_sequences=70", "--shard_tokens=1000")
    corpus, documents = prepared(tmp_path, Copies(5), *options)
    both = np.concatenate([documents["val"], documents["train"]])
    assert (len(documents["val"]), len(documents["train"])) == (70, 600)
    assert (both[:, 0] == corpus.meta["eot_token"]).all()
    assert (both[:, 1:6] == both[:, 6:]).all()
    assert set(both[:, 1:].ravel().tolist()) == set(b"abcdefghijklmnop")  # 16 symbols
    assert len(np.unique(both, axis=0)) > 660  # of a million
    assert_as_likely(np.bincount(documents["train"][:, 1:6].ravel())[ord("a") :])
    known = {"chance": {"loss": np.log(16), "accuracy": 1 / 16}}
    known["optimum"] = {"loss": np.log(16) / 2, "accuracy": 1.0}
    form = {"window_tokens": 11, "scored": [[5, 10]]}
    assert {**form, **known}.items() <= corpus.meta.items()
    assert corpus.meta["train"]["tokens"] == 600 * 11
    out, options = tmp_path / "answers", options[:2]
    corpus, documents = prepared(out, Copies(5, trained="answers"), *options)
    ids, targets = ValidationBatches(
        corpus.val, 10, 257, SequenceLayout.from_meta(corpus.meta)
    ).get([0, 69], 2)
    assert targets[:, :5].eq(-1).all()
    assert (targets[:, 5:].numpy() == documents["val"][[0, 69], 6:]).all()
    assert (ids.numpy() == documents["val"][[0, 69], :-1]).all()
    assert corpus.meta["optimum"] == {"loss": 0.0, "accuracy": 1.0}
    # the shards would be the same, but not what is learned from them
    again = call("data/copy_task/prepare.py", f"--out={out}", "--half=5", *options)
    assert "holds another preparation" in one_line_error(again)


# Seeds and splits


DRAWN = [RECALL, HOPS, WORDS, Copies(5)]


@pytest.mark.parametrize("task", DRAWN, ids=str)
def test_sequences_are_a_function_of_the_seed_and_the_split(task):
    def texts(count, seed, split, cursor=None):
        batches = tasks.Sequences(task, count, seed, split).read(cursor)
        return [text for batch in batches for text in batch.texts]

    train = texts(600, 0, "train")
    assert train == texts(600, 0, "train")
    assert len(set(train)) == 600
    assert texts(300, 0, "train") == train[:300]
    assert texts(600, 0, "train", {"sequence": 512}) == train[512:]
    assert not set(train) & set(texts(600, 1, "train"))
    assert not set(train) & set(texts(600, 0, "val"))


@pytest.mark.parametrize(("task", "count"), [(Words(3, 3), 6**3), (Copies(3, 4), 4**3)], ids=str)
def test_no_validation_window_is_in_training_where_there_are_few(task, count):
    val, train = (
        {text for batch in tasks.Sequences(task, 3000, 0, split).read() for text in batch.texts}
        for split in ("val", "train")
    )
    assert not train & val
    assert len(train | val) == count
    assert len(val) == pytest.approx(count / 8, rel=0.5)


# What is known: chance and optimum


class Answering(torch.nn.Module):
    """Of every window as likely each id that `candidates` gives for a position, and no other."""

    def __init__(self, vocab_size, candidates):
        super().__init__()
        self.vocab_size, self.candidates = vocab_size, candidates

    def forward(self, ids, targets, return_logits=False):
        logits = torch.full((*ids.shape, self.vocab_size), -60.0)
        for row, window in enumerate(ids.tolist()):
            for position, found in enumerate(self.candidates(window[1:]), 1):
                logits[row, position, found] = 0.0
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits if return_logits else None, loss


BLIND = {
    "recall": lambda ids: [ids[1:14:2]] * len(ids),  # the values of the window
    "k_hop": lambda ids: [[1, 2, 3, 4]] * len(ids),
    # the first composes nothing
    "permutations": lambda ids: [[ids[0]]] + [list(range(1, 121))] * (len(ids) - 1),
}


@pytest.mark.parametrize(("task", "solve"), SOLVED[:3], ids=BLIND)
def test_chance_and_optimum_are_those_of_meta_json(tmp_path, task, solve):
    blind = BLIND[task.name]
    corpus, _ = prepared(tmp_path, task, "--sequences=10", "--val_sequences=40")
    layout = SequenceLayout.from_meta(corpus.meta)
    batches = ValidationBatches(corpus.val, task.positions + 1, task.vocab_size, layout)
    world = World(0, 1, torch.device("cpu"))

    def scores(candidates):
        model = Answering(task.vocab_size, candidates)
        return evaluate(model, batches, list(range(40)), 8, world, contextlib.nullcontext())

    best = scores(lambda ids: [[answer] for answer in solve(ids, task)])
    assert best.pop("loss") == pytest.approx(corpus.meta["optimum"]["loss"], abs=1e-6)
    assert best == {"accuracy": 1.0, "exact_match": 1.0}
    assert scores(blind)["loss"] == pytest.approx(corpus.meta["chance"]["loss"], rel=1e-5)
    share = 1 / len(blind([1] * task.positions)[-1])
    assert corpus.meta["chance"]["accuracy"] == pytest.approx(share)


# Mistakes

BOUNDS = {
    "recall": "pairs=1 positions=7 symbols=2 sequences=0 val_sequences=0 seed=-1",
    "k_hop": "fewest=0 symbols=2",
    "permutations": "length=1 degree=7 shard_tokens=0",
    "copy_task": "half=0 symbols=65",
}
WRONG = [(name, f"--{w}", f"{w}: give") for name in BOUNDS for w in BOUNDS[name].split()]
WRONG += [
    ("recall", "--pairs=17", "--positions=48 is too few for 17 pairs and their queries; give 68"),
    ("recall", "--symbols=14", "--symbols=14 is too few for 8 pairs of a key and a value; give 16"),
    ("recall", "--symbols=33", "--symbols=33 is odd"),
    ("k_hop", "--hops=20", "hardly ever have so many hops"),
    ("k_hop", "--fewest=5", "--fewest=5 is more than --hops=4; give 1 to 4"),
    ("recall", "--tokenizer=bytes", "unknown option --tokenizer"),
    ("permutations", "--degree=2 --length=2", "too few different sequences for both splits"),
    ("copy_task", "--half=1 --symbols=2", "for both splits; give a larger half"),
]


@pytest.mark.parametrize(("task", "options", "message"), WRONG)
def test_options_that_make_no_corpus(tmp_path, monkeypatch, task, options, message):
    monkeypatch.setattr(tasks, "MOST_ROUNDS", 20)
    monkeypatch.setattr(tasks, "VAL_SHARE", 2**40 if "splits" in message else 8)
    out = tmp_path / "out"
    line = one_line_error(call(f"data/{task}/prepare.py", *options.split(), f"--out={out}"))
    assert message in line
    assert not out.exists()


# From shards to a run, its evaluation and what it says


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of six steps on recall and its corpus."""
    folder = tmp_path_factory.mktemp("recall")
    prepared(folder / "data", Recall(3, 15, 20), "--sequences=200", "--val_sequences=20")
    trained = call("train.py", *small_run(folder / "data", folder / "run"))
    assert trained.returncode == 0, trained.stderr.decode()
    assert b"bits per byte" not in trained.stdout
    return folder / "run", folder / "data"


def test_a_run_is_scored_and_resumed(run, tmp_path):
    out, data = run
    last = metrics.read(out / "metrics.jsonl")[-1]
    assert last["val_sequences"] == 20
    assert 0 <= last["val_exact_match"] <= last["val_accuracy"] < 1
    assert "val_bits_per_byte" not in last
    shutil.copytree(out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    saved = ("--block_size", "--vocab_size")
    keys = [key for key in small_run(data, tmp_path / "run") if not key.startswith(saved)]
    again = call("train.py", *keys, "--resume=auto")
    assert again.returncode == 0, again.stderr.decode()
    assert metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]["val_loss"] == last["val_loss"]


def test_a_run_is_evaluated_on_its_validation_split_alone(run, tmp_path):
    out, _ = run
    result = call("eval.py", out, "--val", "--dtype=float32", "--device=cpu")
    assert result.returncode == 0, result.stderr.decode()
    [entry] = json.loads((out / "eval" / "results.json").read_text())["entries"]
    last = metrics.read(out / "metrics.jsonl")[-1]
    assert entry["record"]["val_loss"] == pytest.approx(last["val_loss"], rel=1e-5)
    for key in ("val_accuracy", "val_exact_match"):
        assert entry["record"][key] == last[key]
    table = (out / "eval" / "table.csv").read_text()
    assert str(last["val_accuracy"]) in table
    assert "bits per byte" not in table
    line = one_line_error(call("eval.py", out, "--tasks=lambada_openai"))
    assert "the tokens of this model are ids, not text" in line
    assert "--val" in line
    assert "its tokens are ids, not text" in one_line_error(call("export.py", out, tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_samples_are_numbers(run):
    out, _ = run
    keys = ["--temperature=0", "--max_new_tokens=1", "--device=cpu"]
    result = call("sample.py", out, "--prompt=3 14 5 17 3", *keys)
    assert result.returncode == 0, result.stderr.decode()
    text = result.stdout.decode().split()
    assert text[:5] == ["3", "14", "5", "17", "3"]
    assert all(token.isdecimal() or token == "<|endoftext|>" for token in text)
    assert (
        "its first new token is the answer to the last token of the prompt"
        in result.stderr.decode()
    )
    for prompt in ("def", "3 21", "-1"):
        line = one_line_error(call("sample.py", out, f"--prompt={prompt}", *keys))
        assert (
            "is not a token, because the tokens of this model are ids; give numbers from 0 to 20"
            in line
        )


@pytest.mark.parametrize("name", BLIND)
def test_the_config_fits_every_difficulty(name, tmp_path):
    keys = [str(ROOT / "config" / f"{name}_cpu.py"), f"--dataset={tmp_path}"]
    option = "--length=3" if name == "permutations" else "--positions=50"
    made = call(f"data/{name}/prepare.py", f"--out={tmp_path}", option, "--sequences=300")
    assert made.returncode == 0, made.stderr.decode()
    run, model = configure(keys)
    open_data(run, model)
    meta = open_corpus(str(tmp_path)).meta
    assert model.block_size == meta["window_tokens"] // 2
    assert model.vocab_size == -(-meta["vocab_size"] // 64) * 64
    with pytest.raises(ValueError, match="block_size=99, but the documents"):
        open_data(*configure([*keys, "--block_size=99"]))
