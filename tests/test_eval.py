"""Test eval.py: results equal lm-eval's own `hf` model item by item; tables, files, mistakes."""

import json
import re
import shutil
import socket
from pathlib import Path

import huggingface_hub
import lm_eval_tasks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from export_helpers import export_run, save_run
from helpers import one_line_error, small_run, write_checksums
from in_process import call

from data import shards, tokenizer
from model import build
from model.causality import move_parameters

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
import lm_eval.evaluator
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import eval as eval_script
from evaluation import tasks
from evaluation.language_model import LanguageModel
from model_folder import describe
from training import checkpoint

CHOICES = list(lm_eval_tasks.FORMATS)
TINY = {
    "vocab_size": 328,
    "block_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "hidden_size": 12,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return lm_eval_tasks.write_tasks(tmp_path_factory.mktemp("tasks"), 26)


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # the packages may have been imported already
    for package in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{package}.HF_HUB_OFFLINE", True)
    # seconds of pip
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def encoding(folder):
    """Train byte pairs on the tasks' own text, so that contexts and choices end within tokens."""
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    return tokenizer.train_byte_pairs(texts, 320)


def language_model(model, batch_size=4, encoding=None):
    return LanguageModel(model, encoding or tokenizer.byte_tokenizer(), batch_size)


# ---- the numbers ----


def check_sample(task_name, own, expected):
    """Compare one item's requests, answers and metrics with those of lm-eval's model."""
    assert own["arguments"] == expected["arguments"]
    if task_name == "continued":
        assert own["resps"] == expected["resps"]
    elif task_name == "texts":
        nats = own["resps"][0][0]
        assert nats == pytest.approx(expected["resps"][0][0], abs=1e-4, rel=1e-6)
    else:
        nats, greedy = zip(*own["filtered_resps"])
        expected_nats, expected_greedy = zip(*expected["filtered_resps"])
        assert nats == pytest.approx(expected_nats, abs=1e-4)
        assert greedy == expected_greedy
        assert own["acc"] == expected["acc"]
        assert own["acc_norm"] == expected["acc_norm"]


def test_every_item_is_what_lm_evals_own_model_makes_of_the_exported_folder(
    folder, encoding, tmp_path
):
    model_name = "DDL-gpt-mha-rope-CC-EC"
    model = move_parameters(build(model_name, **TINY))
    saved = save_run(tmp_path / "run", model, model_name, encoding)
    exported = export_run(saved, tmp_path / "exported")
    hf_model = HFLM(
        str(exported), trust_remote_code=True, device="cpu", dtype="float32", batch_size=16
    )
    loaded_model, loaded_encoding = describe(saved).load("cpu")
    own_model = language_model(loaded_model, 16, loaded_encoding)
    names = [*CHOICES, "texts", "continued"]
    manager = tasks.make_task_manager(names, str(folder))
    chosen = {name: [] for name in CHOICES}
    for shots in (0, 1):
        own, expected = (
            tasks.evaluate(model, names, manager, shots, log_samples=True, bootstrap_iters=0)
            for model in (own_model, hf_model)
        )
        for name in names:
            pairs = zip(own["samples"][name], expected["samples"][name], strict=True)
            for own_sample, expected_sample in pairs:
                check_sample(name, own_sample, expected_sample)
            for key, value in expected["results"][name].items():
                if "," in key and "stderr" not in key:
                    assert own["results"][name][key] == pytest.approx(value, rel=1e-5), key
        for name in CHOICES:
            for sample in own["samples"][name]:
                chosen[name].append(np.argmax([nats for nats, _ in sample["filtered_resps"]]))
    # the comparison means something: items were scored, and not always the same choice won
    assert sum(map(len, chosen.values())) == 2 * 4 * 26
    assert all(len(set(choices)) > 1 for choices in chosen.values())


def score_naively(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Score one request alone; compute the logits of each token from the whole text before it."""
    nats = 0.0
    is_greedy = True
    tokens = [*context, *continuation][-(model.config.block_size + 1) :]
    for position in range(len(tokens) - len(continuation), len(tokens)):
        logits = model(torch.tensor([tokens[:position]]))[0][0, -1]
        nats += F.log_softmax(logits, dim=-1)[tokens[position]].item()
        if logits.argmax().item() != tokens[position]:
            is_greedy = False
    return nats, is_greedy


def generate_greedily(model, context: list[int], count: int) -> list[int]:
    """Return the most likely token after a context, `count` times."""
    for _ in range(count):
        logits = model(torch.tensor([context[-model.config.block_size :]]))[0][0, -1]
        context = [*context, logits.argmax().item()]
    return context[-count:]


@pytest.mark.parametrize(
    ("batch_size", "max_logits", "max_tokens"),
    [
        (3, 2**26, 2**16),
        (100, 3 * 328, 2**16),  # the logits of three positions at once
        (100, 2**26, 60),
    ],
)
def test_awkward_requests_equal_a_naive_loop(monkeypatch, batch_size, max_logits, max_tokens):
    monkeypatch.setattr("evaluation.language_model.MAX_LOGITS", max_logits)
    monkeypatch.setattr("evaluation.language_model.MAX_BATCH_TOKENS", max_tokens)
    model = move_parameters(build("DDL-gpt-mha-rope-EC", **{**TINY, "block_size": 20}))
    model = model.double().eval()
    with torch.no_grad():
        start = [5, 6, 7]
        too_long = list(range(30))
        almost_full = [7] * 19
        greedy = generate_greedily(model, start, 4)
        requests = [
            # continuations that begin alike, some of them greedy, one of them twice
            (start, greedy),
            (start, greedy[:3]),
            (start, [*greedy[:3], 9]),
            (start, greedy[:1]),
            (start, greedy),
            # no context but the end of a text, and a continuation as long as block_size
            ([256], [1]),
            ([256], list(range(20))),
            # contexts that must be cut
            (too_long, [1, 2]),
            (too_long, [1, 3]),
            (too_long, [1]),
            (almost_full, [7, 7]),
            (almost_full, [7, 8]),
            # contexts of which one begins another
            ([9] * 12, [3] * 7),
            ([9] * 3, [4]),
            ([1, 2, 3, 4, 5, 6], [7]),
            ([1, 2, 3], [9]),
        ]
        expected = [score_naively(model, *request) for request in requests]
    own = language_model(model, batch_size)
    scores = own._loglikelihood_tokens([(None, *request) for request in requests])
    expected_nats, expected_greedy = zip(*expected)
    assert [nats for nats, _ in scores] == pytest.approx(expected_nats, abs=1e-9)
    assert tuple(is_greedy for _, is_greedy in scores) == expected_greedy
    assert expected_greedy.count(True) >= 4
    assert own.num_cut == 3


QUESTION = [1] * 50


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        # batches of eight; the ninth choice is alone
        ([(QUESTION, [choice] * 3) for choice in range(9)], [(1, 50), (8, 2), (1, 52)]),
        # the logits after the question are those of all four
        ([(QUESTION, [choice]) for choice in (2, 3, 4, 5)], [(1, 50)]),
        # with padding on the left, the first context and the last continuation would not fit
        (
            [([1] * 96, [2]), ([1] * 96, [3]), ([3], [4, 4, 4]), ([3], [4, 4, 5])],
            [(1, 96), (1, 1), (2, 2)],
        ),
    ],
)
def test_a_question_is_read_once(requests, expected):
    """The expected passes of the model are given as (sequences, tokens)."""
    passes = []
    model = build("gpt-mha-rope", **TINY)
    hidden = model.hidden

    def record_pass(ids, *arguments):
        passes.append(tuple(ids.shape))
        return hidden(ids, *arguments)

    model.hidden = record_pass
    language_model(model, 8)._loglikelihood_tokens([(None, *request) for request in requests])
    assert passes == expected


def score(own, *pairs):
    """Return the log-likelihoods of continuations of contexts."""
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    return [nats for nats, _ in own.loglikelihood(requests)]


def test_contexts_and_continuations_without_a_token():
    encoding = tokenizer.train_byte_pairs(["Zeile"] * 9, 261)
    assert len(encoding.encode("Zeile")) == 1
    model = move_parameters(build("gpt-mha-rope", **TINY))
    own = language_model(model, encoding=encoding)
    within, empty, blank, ended = score(
        own, ("Zei", "le"), ("ab", ""), (" ", "yes"), ("<|endoftext|> ", "yes")
    )
    # a continuation within a token of its context is tokenized by itself
    expected, _ = score_naively(model, encoding.encode("Zei"), encoding.encode("le"))
    assert within == pytest.approx(expected, abs=1e-4)
    assert empty == 0
    # lm-eval moves the blank to the continuation
    assert blank == pytest.approx(ended)


def test_a_continuation_longer_than_block_size_is_refused():
    own = language_model(build("gpt-mha-rope", **TINY))
    with pytest.raises(ValueError, match="has 97 tokens, but the model's block_size is 96"):
        score(own, ("a", "b" * 97))


def generate(own, **settings):
    requests = [
        Instance("generate_until", {}, (text, {"until": "x", **settings}), index)
        for index, text in enumerate(["a", "longer", "bc"])
    ]
    return own.generate_until(requests)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"generates up to 256 tokens, .* block_size is 40; set max_gen_toks"),
        ({"max_gen_toks": 4, "num_beams": 2}, "generates with num_beams, which is not supported"),
    ],
)
def test_a_task_that_generates_too_much_or_otherwise_is_refused(settings, message):
    own = language_model(build("gpt-mha-rope", **{**TINY, "block_size": 40}))
    with pytest.raises(ValueError, match=message):
        generate(own, **settings)


def test_one_beam_is_greedy_and_batches_change_nothing():
    model = move_parameters(build("gpt-mha-rope", **{**TINY, "block_size": 40}))
    alone, together = language_model(model, 1), language_model(model, 8)
    greedy = generate(alone, max_gen_toks=4)
    assert generate(together, max_gen_toks=4, num_beams=1, do_sample=False) == greedy
    assert len(set(greedy)) > 1


# ---- the command ----


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Train a model of bytes."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    arguments = small_run(
        corpus,
        out,
        model="DDL-gpt-mha-rope-CC",
        block_size=40,
        learning_rate=0.1,
        eval_full=True,
        ema_half_life=2,
    )
    result = call("train.py", *arguments)
    assert result.returncode == 0, result.stderr.decode()
    return out


def run_eval(*arguments) -> str:
    """Run eval.py in this process, and return its output."""
    result = call("eval.py", *arguments)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def read_records(out: Path) -> list[dict]:
    """Return the results in a folder, the oldest first."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("results_*.json"))]


def test_the_validation_split_is_measured_as_in_training(run, tmp_path):
    output = run_eval(run, "--val", f"--out={tmp_path}")
    [record] = read_records(tmp_path)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for key in ("val_loss", "val_perplexity", "val_bits_per_byte"):
        assert record["validation"][key] == pytest.approx(last[key], rel=1e-6)
        assert f"{record['validation'][key]:.4f}" in output
    assert record["tokens"] == 2388  # every token but the first
    assert all(record[key] for key in ("commit", "date", "machine", "command"))


def test_several_models_and_shots_are_in_one_table(run, folder, corpus):
    earlier = run / "checkpoints/step_00000003"
    averaged = run / "checkpoints/step_00000006/ema"
    output = run_eval(
        *(run, earlier, averaged),
        *("--tasks=questions,texts", f"--include_path={folder}"),
        *("--limit=3", "--shots=0,1", "--val", "--dtype=bfloat16"),
    )
    labels = ("tiny, step 6", "tiny, step 3", "tiny, step 6, averaged weights")
    records = read_records(run / "eval")
    # each model is validated, and then evaluated with each number of shots
    assert [record["label"] for record in records] == [label for label in labels for _ in range(3)]
    assert re.search(r"\nnote: \d+ contexts were cut on the left to block_size=40\n", output)
    table = (run / "eval/table.md").read_text()
    assert table in output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0] == ["", "shots", *labels]
    [row] = [row for row in rows if row[:2] == ["questions (acc_norm)", "1"]]
    for cell, record in zip(row[2:], records[2::3], strict=True):
        assert record["n-samples"]["questions"]["effective"] == 3
        assert cell.startswith(f"{100 * record['results']['questions']['acc_norm,none']:.2f} ± ")
    [row] = [row for row in rows if row[:1] == [f"loss (nats/token), {Path(corpus).name}"]]
    assert row[2:] == [f"{record['validation']['val_loss']:.4f}" for record in records[::3]]
    assert "\nComputed in bfloat16, on the first 3 items of each task.\n" in table
    shutil.rmtree(run / "eval")


def test_items_are_written_as_lm_eval_writes_them(run, folder, tmp_path):
    options = (f"--include_path={folder}", f"--out={tmp_path}", "--limit=3", "--log_samples")
    run_eval(run, "--tasks=questions,continued", *options)
    [results] = tmp_path.glob("results_*.json")
    date = results.stem.partition("_")[2]
    for name in ("questions", "continued"):
        lines = (tmp_path / f"samples_{name}_{date}.jsonl").read_text().splitlines()
        assert len(lines) == 3
        assert json.loads(lines[0]).keys() >= {"doc_hash", "arguments", "resps", "target"}


def test_a_group_without_a_figure_shows_those_of_its_tasks(run, tmp_path):
    files = lm_eval_tasks.write_tasks(tmp_path, 3)
    (files / "both.yaml").write_text("group: both\ntask: [questions, gaps]\n")
    run_eval(run, "--tasks=both", f"--include_path={files}", f"--out={tmp_path / 'out'}")
    [record] = read_records(tmp_path / "out")
    assert [result["task"] for result in record["shown"]] == ["questions", "gaps"]


def test_a_corpus_that_was_replaced_is_not_evaluated_unawares(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    folder = checkpoint.find(copy)
    state = json.loads((folder / "state.json").read_text())
    state["corpus"]["sample_sha256"] = "0" * 64
    (folder / "state.json").write_text(json.dumps(state))
    write_checksums(folder)
    message = one_line_error(call("eval.py", copy, "--val"))
    assert "is no longer the corpus that" in message


# ---- mistakes ----


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    return export_run(run, tmp_path_factory.mktemp("exports") / "exported")


def read_own_tasks(include_path, **_):
    """Read no task of lm-eval's own thousands of files, which takes seconds."""
    return TaskManager(include_path=include_path, include_defaults=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "RUN --tasks=question --include_path=TASKS",
            "neither lm-eval nor a readable file in TASKS has a task question, did you mean",
        ),
        ("RUN --tasks=questions --shots=1,x", "--shots=1,x: give whole numbers"),
        ("RUN --tasks=,", "--tasks names no task; give at least one task, or --val"),
        ("RUN --val=OTHER", "was tokenized with a different tokenizer than that of"),
        ("EXPORTED --val", "does not name the corpus that it was trained on; give --val=DATASET"),
    ],
)
def test_mistakes_end_in_one_line_before_any_work(
    run, exported, folder, tmp_path, monkeypatch, arguments, message
):
    for split in ("train", "val"):
        shards.write_shard(tmp_path / f"a_{split}_000000.bin", np.arange(99))
    (tmp_path / "meta.json").write_text('{"vocab_size": 130}')
    (tmp_path / "tokenizer.json").write_text('{"name": "ids", "vocab_size": 130}')
    paths = {"RUN": run, "EXPORTED": exported, "TASKS": folder, "OTHER": tmp_path}
    for name, path in paths.items():
        arguments = arguments.replace(name, str(path))
        message = message.replace(name, str(path))
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", read_own_tasks)
    line = one_line_error(call("eval.py", *arguments.split(), f"--out={tmp_path / 'out'}"))
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (("question}}", "questoin}}"), "UndefinedError(\"'questoin' is undefined\")"),
        (("_test.jsonl", "_absent.jsonl"), "_absent.jsonl"),
    ],
)
def test_a_mistake_in_a_task_file_is_named_before_any_work(run, tmp_path, change, part):
    files = lm_eval_tasks.write_tasks(tmp_path, 3)
    path = files / "questions.yaml"
    path.write_text(path.read_text().replace(*change))
    out = tmp_path / "out"
    options = (f"--include_path={files}", f"--out={out}", "--val")
    result = call("eval.py", run, "--tasks=letters,questions", *options)
    assert result.returncode == 2
    line = result.stderr.decode().splitlines()[-1]  # after datasets' progress bars
    assert line.startswith("eval.py: error: --tasks=questions: ")
    assert part in line
    assert not out.exists()


def test_more_examples_than_a_task_has_are_refused(run, folder, tmp_path):
    options = (f"--include_path={folder}", f"--out={tmp_path}", "--shots=21")
    result = call("eval.py", run, "--tasks=gaps", *options)
    assert result.returncode == 2
    line = result.stderr.decode().splitlines()[-1]
    assert line.startswith("eval.py: error: tasks gaps, 21-shot: ")


def test_without_a_hub_the_cause_is_named_and_with_one_it_is_asked(folder, server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(tasks, "find_connection_problem", tasks.find_connection_problem.__wrapped__)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    with tasks.reach_data() as problem:
        assert problem is None
        assert not huggingface_hub.constants.HF_HUB_OFFLINE
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    manager = tasks.make_task_manager(["questions", "absent"], str(folder))
    message = f"--tasks=absent: {address} cannot be reached .*, and the local cache lacks its data"
    with pytest.raises(ValueError, match=message):
        tasks.check_tasks(["questions", "absent"], manager)
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


# ---- the result that a table shows ----


ACCURACIES = {
    "acc,none": 0.25,
    "acc_stderr,none": 0.1,
    "acc_norm,none": 0.5,
    "acc_norm_stderr,none": "N/A",
    "alias": "x",
}


@pytest.mark.parametrize(
    ("task", "results", "expected"),
    [
        ("winogrande", ACCURACIES, [("acc", 25.0, 10.0)]),
        ("other", ACCURACIES, [("acc_norm", 50.0, None)]),
        (
            "lambada",
            {"perplexity,none": 12.5, "perplexity_stderr,none": 0.5},
            [("perplexity", 12.5, 0.5)],
        ),
        # SQuAD's are percentages already
        ("squad", {"f1,none": 50.5, "f1_stderr,none": "N/A"}, [("f1", 50.5, None)]),
        ("no numbers", {"alias": "odd", "acc,none": "N/A"}, []),
    ],
)
def test_the_metric_that_a_table_shows(task, results, expected):
    every_result = {"results": {task: results}, "group_subtasks": {}, "n-shot": {task: 3}}
    assert tasks.choose_results(every_result) == [(task, 3, *result) for result in expected]


@pytest.mark.parametrize(
    ("shots", "expected"), [({"a": 1, "b": 1, "both": 1}, ["both"]), ({"a": 1, "b": 2}, ["a", "b"])]
)
def test_a_group_stands_for_tasks_with_one_number_of_shots(shots, expected):
    results = {name: {"acc,none": 0.5} for name in ("both", "a", "b")}
    every_result = {"results": results, "group_subtasks": {"both": ["a", "b"]}, "n-shot": shots}
    assert [result.task for result in tasks.choose_results(every_result)] == expected


def test_the_papers_tasks_are_evaluated_as_in_the_paper_without_shots():
    assert tasks.parse_names("paper, mine,piqa") == [*tasks.PAPER_METRICS, "mine"]
    assert eval_script.parse_shots(None, list(tasks.PAPER_METRICS)) == [0, 1]
    assert eval_script.parse_shots(None, ["piqa"]) == [None]
    assert eval_script.parse_shots("5,0,5", list(tasks.PAPER_METRICS)) == [5, 0]


@pytest.mark.slow
def test_lm_eval_has_the_papers_tasks_and_metrics():
    manager = tasks.make_task_manager(list(tasks.PAPER_METRICS), None)
    for name, metric in tasks.PAPER_METRICS.items():
        metrics = manager.task_index[name].cfg["metric_list"]
        assert metric in [settings["metric"] for settings in metrics]
