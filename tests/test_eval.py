"""Test eval.py: results equal lm-eval's own `hf` model item by item; tables, stores, mistakes."""

import csv
import io
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import lm_eval_tasks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from export_helpers import export_run, save_run
from helpers import SMALL, one_line_error, small_run, write_checksums
from in_process import call, call_in_processes

from data import shards, tokenizer
from data.shards import open_corpus
from model import build
from model.causality import move_parameters

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
import lm_eval.evaluator
from lm_eval.api.instance import Instance
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import eval
from evaluation import comparison, published, runner, subjects, tasks
from evaluation.language_model import LanguageModel, make_batches
from model_folder import load_model
from training import checkpoint
from utils.processes import World

ALONE = World(0, 1, torch.device("cpu"))
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


def evaluate_with_lm_eval(language_model, names, folder, shots):
    """Evaluate tasks as lm-eval's command line does."""
    return lm_eval.evaluator.simple_evaluate(
        language_model,
        tasks=list(names),
        num_fewshot=shots,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )


@pytest.fixture(scope="module")
def encoding(folder):
    """Train byte pairs on the tasks' own text, so that contexts and choices end within tokens."""
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    return tokenizer.train_byte_pairs(texts, 320)


def language_model(model, batch_size=4, encoding=None, add_bos_token=False):
    encoding = encoding or tokenizer.byte_tokenizer()
    return LanguageModel(model, encoding, ALONE, batch_size, add_bos_token=add_bos_token)


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
    folder, encoding, tmp_path, monkeypatch
):
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # seconds of pip
    model_name = "DDL-gpt-mha-rope-CC-EC"
    model = move_parameters(build(model_name, **TINY))
    saved = save_run(tmp_path / "run", model, model_name, encoding)
    exported = export_run(saved, tmp_path / "exported")
    hf_model = HFLM(
        str(exported), trust_remote_code=True, device="cpu", dtype="float32", batch_size=16
    )
    loaded_model, loaded_encoding, _ = subjects.find(str(saved)).load("cpu")
    own = language_model(loaded_model, 16, loaded_encoding)
    names = [*CHOICES, "texts", "continued"]
    loaded, missing = tasks.load_tasks(names, str(folder), ALONE)
    assert not missing
    chosen = {name: [] for name in CHOICES}
    for shots in (0, 1):
        expected = evaluate_with_lm_eval(hf_model, names, folder, shots)
        for task in loaded:
            tasks.set_num_shots(task, shots)
            evaluated = lm_eval.evaluator.evaluate(own, task.content)
            own_samples = evaluated["samples"][task.name]
            expected_samples = expected["samples"][task.name]
            for own_sample, expected_sample in zip(own_samples, expected_samples, strict=True):
                check_sample(task.name, own_sample, expected_sample)
            if task.name in CHOICES:
                for sample in own_samples:
                    nats = [nats for nats, _ in sample["filtered_resps"]]
                    chosen[task.name].append(np.argmax(nats))
            for key, value in expected["results"][task.name].items():
                if "," in key and "stderr" not in key:
                    own_value = evaluated["results"][task.name][key]
                    assert own_value == pytest.approx(value, rel=1e-5), key
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
    ("batch_size", "max_logits"),
    [
        (3, 2**26),
        (100, 3 * 328),  # the logits of three positions at once
    ],
)
def test_awkward_requests_equal_a_naive_loop(monkeypatch, batch_size, max_logits):
    monkeypatch.setattr("evaluation.language_model.MAX_LOGITS", max_logits)
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
            # no context but the end of a text
            ([256], [1]),
            ([256], list(range(20))),
            # contexts that must be truncated
            (too_long, [1, 2]),
            (too_long, [1, 3]),
            (too_long, [1]),
            (almost_full, [7, 7]),
            (almost_full, [7, 8]),
            # contexts of which one begins another
            ([9] * 12, [3] * 7),
            ([9] * 12, [4] * 8),
            ([9] * 3, [4]),
            ([1, 2, 3, 4, 5, 6], [7]),
            ([1, 2, 3], [9]),
        ]
        expected = [score_naively(model, *request) for request in requests]
    own = language_model(model, batch_size)
    scores = own._loglikelihood_tokens([(None, *request) for request in requests])
    expected_nats = [nats for nats, _ in expected]
    expected_greedy = [is_greedy for _, is_greedy in expected]
    assert [nats for nats, _ in scores] == pytest.approx(expected_nats, abs=1e-9)
    assert [is_greedy for _, is_greedy in scores] == expected_greedy
    assert expected_greedy.count(True) >= 4


def test_a_context_of_blanks_alone_is_read_as_the_beginning_of_a_text():
    own = language_model(move_parameters(build("gpt-mha-rope", **TINY)))
    requests = [(" ", "yes"), ("<|endoftext|> ", "yes")]
    blank, ended = own.loglikelihood(
        [Instance("loglikelihood", {}, request, index) for index, request in enumerate(requests)]
    )
    assert blank == pytest.approx(ended)


QUESTION = [1] * 50
FOUR_CHOICES = (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        pytest.param(
            [(QUESTION, [choice] * 3) for choice in FOUR_CHOICES],
            [(1, 50), (4, 2)],
            id="a_common_question",
        ),
        pytest.param(
            # the logits after the question are those of all four
            [(QUESTION, [choice]) for choice in FOUR_CHOICES],
            [(1, 50)],
            id="choices_of_one_token",
        ),
        pytest.param(
            # after the question, nothing is left of the first request
            [(QUESTION, [2]), (QUESTION, [3, 4, 5])],
            [(1, 50), (1, 2)],
            id="one_choice_of_one_token",
        ),
        pytest.param(
            # if the last request shared ten tokens, the other three would have to read forty more
            [
                (QUESTION, [2, 2]),
                (QUESTION, [3, 3]),
                (QUESTION, [4, 4]),
                ([*QUESTION[:10], *[7] * 30], [8]),
            ],
            [(1, 50), (3, 1), (1, 40)],
            id="a_short_common_beginning",
        ),
    ],
)
def test_a_common_context_is_read_once(requests, expected):
    """The expected passes of the model are given as (sequences, tokens)."""
    passes = []
    model = build("gpt-mha-rope", **TINY)
    hidden = model.hidden

    def record_pass(ids, *arguments):
        passes.append(ids.shape)
        return hidden(ids, *arguments)

    model.hidden = record_pass
    own = language_model(model, 8)
    own._loglikelihood_tokens([(None, *request) for request in requests])
    assert passes == expected


def test_batches_hold_every_request_once_and_keep_to_their_size():
    generator = np.random.default_rng(0)
    requests = []
    own = language_model(build("gpt-mha-rope", **{**TINY, "block_size": 48}))
    for _ in range(60):
        context = generator.integers(0, 9, generator.integers(1, 60)).tolist()
        for _ in range(generator.integers(1, 6)):
            continuation = generator.integers(0, 9, generator.integers(1, 9)).tolist()
            requests.append((None, context, continuation))
    batches = make_batches(own.truncate(requests), 7, 48)
    groups = [group for batch in batches for group in batch]
    indices = [request.index for group in groups for request in group.requests]
    assert sorted(indices) == list(range(len(requests)))
    assert max(len(batch) for batch in batches) > 1
    for batch in batches:
        assert sum(len(group.requests) for group in batch) <= 7
        max_prefix_len = max(len(group.prefix) for group in batch)
        assert max_prefix_len + max(group.suffix_len for group in batch) <= 48
    for group in groups:
        for request in group.requests:
            assert request.tokens[: len(group.prefix)] == group.prefix != []


def test_a_beginning_that_all_share_does_not_make_one_batch(monkeypatch):
    own = language_model(build("gpt-mha-rope", **{**TINY, "block_size": 48}))
    requests = own.truncate([(None, [*range(20), number], [7]) for number in range(50)])
    batches = make_batches(requests, 16, 48)
    assert [len(group.requests) for [group] in batches] == [16, 16, 16, 2]
    monkeypatch.setattr("evaluation.language_model.MAX_BATCH_TOKENS", 100)
    batches = make_batches(requests, 16, 48)
    assert {len(group.requests) for [group] in batches[:-1]} == {100 // 21}


# ---- requests that do not fit, and shots that there are not ----


def score(own, *pairs):
    """Return the log-likelihoods of continuations of contexts."""
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    return [nats for nats, _ in own.loglikelihood(requests)]


def test_a_continuation_within_a_token_of_its_context_is_scored_by_itself():
    encoding = tokenizer.train_byte_pairs(["Zeile"] * 9, 261)
    assert len(encoding.encode("Zeile")) == 1
    model = move_parameters(build("gpt-mha-rope", **TINY))
    own = language_model(model, encoding=encoding)
    nats = score(own, ("Zei", "le"), ("Zei", "xx"))
    context = encoding.encode("Zei")
    expected, _ = score_naively(model, context, encoding.encode("le"))
    assert nats[0] == pytest.approx(expected, abs=1e-4)
    assert own.pop_notes() == [
        "1 of 2 continuations have no token of their own, such as 'le' after 'Zei'; they are "
        "tokenized without their context"
    ]


def test_an_empty_continuation_is_certain():
    own = language_model(build("gpt-mha-rope", **TINY))
    assert score(own, ("ab", ""), ("ab", "c"))[0] == 0


@pytest.fixture
def load_choices(tmp_path):
    """Return a function that loads a task with three documents in the split data, and settings."""
    rows = [{"question": f"Question {n}", "choices": ["a", "b"], "label": 0} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(*settings: str) -> tasks.LoadedTask:
        lines = [
            "task: mine",
            "dataset_path: json",
            f"dataset_kwargs: {{data_files: {{data: {tmp_path / 'rows.jsonl'}}}}}",
            "output_type: multiple_choice",
            "doc_to_text: question",
            "doc_to_target: label",
            "doc_to_choice: choices",
            *settings,
        ]
        (tmp_path / "mine.yaml").write_text("\n".join(lines))
        [loaded], _ = tasks.load_tasks(["mine"], str(tmp_path), ALONE)
        return loaded

    return load


@pytest.mark.parametrize(
    ("settings", "max_shots"),
    [(["test_split: data"], 3), (["test_split: data", "fewshot_split: data"], 2)],
    ids=["any document", "any other document"],
)
def test_more_shots_than_documents_are_refused(load_choices, settings, max_shots):
    task = load_choices(*settings)
    tasks.set_num_shots(task, max_shots)
    task.tasks["mine"].build_all_requests()
    message = f"--shots=4, but mine has only {max_shots} documents to draw examples from"
    with pytest.raises(ValueError, match=message):
        tasks.set_num_shots(task, 4)


def test_notes_of_a_task_are_printed_once(load_choices, run, tmp_path):
    load_choices("test_split: data")
    arguments = ("--tasks=mine", f"--include_path={tmp_path}", "--shots=3", f"--out={tmp_path}")
    lines = run_eval(run, *arguments).output.splitlines()
    notes = [line.split(":")[2] for line in lines if line.startswith("note: mine, 3-shot:")]
    assert len(notes) == 2
    assert "the few-shot examples of mine" in notes[0]
    assert "6 of 6 requests were cut on the left to block_size=40" in notes[1]


OWN_SAMPLES = "fewshot_config: {samples: [{question: a, choices: [b], label: 0}]}"


@pytest.mark.parametrize(
    ("settings", "num_shots", "num_occurrences"),
    [
        # all three documents are examples, as in lm-eval
        (["test_split: data"], 3, 2),
        (["validation_split: data", "fewshot_split: data"], 3, 2),
        (["test_split: data"], 0, 1),
        (["test_split: data", "fewshot_split: data"], 2, 1),
        (["validation_split: data"], 2, 1),
        (["test_split: data", OWN_SAMPLES], 1, 1),
    ],
)
def test_examples_that_may_be_the_evaluated_document_are_noted(
    load_choices, settings, num_shots, num_occurrences
):
    task = load_choices(*settings)
    tasks.set_num_shots(task, num_shots)
    notes = tasks.describe_leaks(task)
    assert len(notes) == num_occurrences - 1
    start = "the few-shot examples of mine are drawn from the data split"
    assert all(note.startswith(start) for note in notes)
    task.tasks["mine"].build_all_requests()
    assert all(
        request.args[0].count(request.doc["question"]) == num_occurrences
        for request in task.tasks["mine"].instances
    )


@pytest.mark.parametrize(
    ("has_bos", "add_bos_token", "text", "ids"),
    [
        (False, True, "ab", [256, 97, 98]),
        (False, True, "<|endoftext|>ab", [256, 97, 98]),
        (False, False, "ab<|endoftext|>", [97, 98, 256]),
        (True, True, "ab", [257, 97, 98]),
        (True, True, "<|beginoftext|>ab", [257, 97, 98]),
    ],
)
def test_add_bos_token_puts_one_token_first(has_bos, add_bos_token, text, ids):
    """It is the beginning of text, if there is one, and the end of text otherwise."""
    encoding = tokenizer.byte_tokenizer()
    if has_bos:
        encoding = encoding.with_bos()
    model = build("gpt-mha-rope", **TINY)
    own = language_model(model, encoding=encoding, add_bos_token=add_bos_token)
    assert own.tok_encode(text) == ids
    assert own.prefix_token_id == (257 if has_bos else 256)
    assert own.eot_token_id == 256


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"generates up to 256 tokens, .* block_size is 40; set max_gen_toks"),
        (
            {"max_gen_toks": 4, "num_beams": 2},
            "generates with num_beams=2, which is not supported; change generation_kwargs",
        ),
    ],
)
def test_a_task_that_generates_too_much_or_otherwise_is_refused(settings, message):
    own = language_model(build("gpt-mha-rope", **{**TINY, "block_size": 40}))
    request = Instance("generate_until", {}, ("a", {"until": "x", **settings}), 0)
    with pytest.raises(ValueError, match=message):
        own.generate_until([request])


def test_a_task_with_one_beam_is_greedy():
    own = language_model(build("gpt-mha-rope", **{**TINY, "block_size": 40}))
    requests = [
        Instance("generate_until", {}, ("a", {"until": "x", "max_gen_toks": 4, **settings}), 0)
        for settings in ({}, {"num_beams": 1, "do_sample": False})
    ]
    greedy, one_beam = own.generate_until(requests)
    assert one_beam == greedy


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
    )
    result = call("train.py", *arguments)
    assert result.returncode == 0, result.stderr.decode()
    return out


class EvalResult(NamedTuple):
    code: int
    output: str
    error: str


def run_eval(*arguments) -> EvalResult:
    """Run eval.py in this process."""
    result = call("eval.py", *arguments)
    return EvalResult(result.returncode, result.stdout.decode(), result.stderr.decode())


def read_records(out) -> dict:
    """Return the results in a folder by title."""
    records = [json.loads(path.read_text()) for path in sorted(out.glob("results_*.json"))]
    return {comparison.make_title(record): record for record in records}


@pytest.fixture(scope="module")
def validation(run, tmp_path_factory):
    """Evaluate the run on its validation split; return the record and the output."""
    out = tmp_path_factory.mktemp("validation")
    code, output, error = run_eval(run, "--val", f"--out={out}")
    assert code == 0, error
    [record] = read_records(out).values()
    return record, output


def test_the_validation_split_is_measured_as_in_training(run, validation):
    record, output = validation
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for key in ("val_loss", "val_perplexity", "val_bits_per_byte"):
        assert record["record"][key] == pytest.approx(last[key], rel=1e-6)
        assert f"{record['record'][key]:.4f}" in output
    # a result names its circumstances; a model that is not in the paper is compared with nothing
    assert all(record[key] for key in ("commit", "date", "machine", "command"))
    assert "\nThe paper reports no results for tiny, step 6 (" in output
    assert "| published" not in output


def test_the_whole_validation_split_is_evaluated(run, corpus, validation):
    record, _ = validation
    model, _, _ = load_model(run, "cpu")
    tokens = torch.from_numpy(open_corpus(str(corpus)).val[0].astype(np.int64))
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 40):
            sequence = tokens[start : start + 41]
            logits = model(sequence[None, :-1])[0][0]
            nats += F.cross_entropy(logits, sequence[1:], reduction="sum").item()
    mean_nats = nats / (len(tokens) - 1)
    assert record["tokens"] == len(tokens) - 1
    assert record["record"]["val_loss"] == pytest.approx(mean_nats, rel=1e-5)
    assert record["record"]["val_bits_per_byte"] == pytest.approx(mean_nats / math.log(2), rel=1e-5)


def test_a_checkpoint_whose_optimizer_was_deleted_keeps_its_results(run, tmp_path):
    copy = shutil.copytree(checkpoint.find(run), tmp_path / "copy")
    identity = subjects.find(copy).identity
    (copy / "optimizer.safetensors").unlink()
    assert subjects.find(copy).identity == identity


def test_weights_without_checksums_have_an_identity(run, tmp_path):
    copy = shutil.copytree(checkpoint.find(run), tmp_path / "copy")
    (copy / "SHA256SUMS").unlink()
    identity = subjects.find(copy).identity
    (copy / "tokenizer.json").write_text("{}")
    assert subjects.find(copy).identity != identity


def test_a_corpus_that_was_replaced_is_not_evaluated_unawares(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    folder = checkpoint.find(copy)
    state = json.loads((folder / "state.json").read_text())
    state["corpus"]["sample_sha256"] = "0" * 64
    (folder / "state.json").write_text(json.dumps(state))
    write_checksums(folder)
    message = one_line_error(call("eval.py", copy, "--val"))
    assert "is no longer the corpus that" in message


def test_a_corpus_that_has_moved_is_named_with_the_checkpoint_that_it_comes_from(run, tmp_path):
    subject = subjects.find(run)
    subject.state["run_config"]["dataset"] = "/nowhere"
    with pytest.raises(
        ValueError, match=rf"/nowhere .*--val; {subject.folder} was trained on this"
    ):
        subjects.open_corpus_of(subject, "")


def test_each_corpus_and_dtype_has_a_table(run, corpus, tmp_path):
    other_corpus = tmp_path / "other_corpus"
    shutil.copytree(corpus, other_corpus)
    [shard] = other_corpus.glob("*val*.bin")
    tokens = open_corpus(str(other_corpus)).val[0]
    shards.write_shard(shard, np.array(tokens[: len(tokens) // 2]))
    out = tmp_path / "out"
    for arguments in (
        [f"--val={corpus}"],
        [f"--val={other_corpus}"],
        ["--val", "--dtype=bfloat16"],
        ["--val", "--dtype=float16"],
    ):
        code, _, error = run_eval(run, *arguments, f"--out={out}")
        assert code == 0, error
    name = Path(corpus).name
    records = read_records(out)
    losses = {title: record["record"]["val_loss"] for title, record in records.items()}
    assert losses.keys() == {
        f"validation, {name}, bfloat16",
        f"validation, {name}, float16",
        f"validation, {name}, float32",
        "validation, other_corpus, float32",
    }
    rounded, less_rounded, loss, other_loss = losses.values()
    assert rounded == pytest.approx(loss, rel=0.02)
    assert less_rounded == pytest.approx(loss, rel=0.002)
    assert len({rounded, less_rounded, loss, other_loss}) == 4
    table = (out / "table.md").read_text()
    assert all(f"### {title}\n" in table for title in losses)


def test_two_processes_write_what_one_writes(run, folder, tmp_path):
    arguments = [
        run,
        "--shots=1",
        f"--tasks={','.join([*CHOICES, 'texts', 'continued'])}",
        "--val",
        "--limit=5",
        f"--include_path={folder}",
        "--batch_size=4",
        "--log_samples",
    ]
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert run_eval(*arguments, f"--out={one}").code == 0
    call_in_processes(2, "eval.py", [*arguments, f"--out={two}"], tmp_path / "log")
    records_of_one = read_records(one)
    records_of_two = read_records(two)
    assert records_of_one.keys() == records_of_two.keys()
    for title, record in records_of_one.items():
        for field in ("results", "record", "configs", "weights"):
            assert record.get(field) == records_of_two[title].get(field), (title, field)
        for name, file in record.get("samples", {}).items():
            other_file = records_of_two[title]["samples"][name]
            assert (one / file).read_text() == (two / other_file).read_text()
    for name in ("table.md", "table.tex", "table.csv"):
        assert (one / name).read_text() == (two / name).read_text()


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    return export_run(run, tmp_path_factory.mktemp("exports") / "exported")


def test_a_group_without_a_figure_shows_those_of_its_tasks(run, tmp_path):
    files = lm_eval_tasks.write_tasks(tmp_path, 3)
    out = tmp_path / "out"
    (files / "both.yaml").write_text("group: both\ntask: [questions, gaps]\n")
    code, output, error = run_eval(
        run, "--tasks=both", f"--include_path={files}", f"--out={out}", "--limit=3"
    )
    assert code == 0, error
    assert "0-shot, float32, only the first 3 items\n" in output
    [record] = read_records(out).values()
    assert list(record["shown"]) == ["questions", "gaps"]


# ---- what is evaluated again ----


class Evaluation:
    """An evaluation that can be repeated with other options and task files."""

    def __init__(self, run, folder, monkeypatch):
        self.run = run
        self.files = lm_eval_tasks.write_tasks(folder, 3)
        self.out = folder / "out"
        self.calls = []  # (name of the task, number of shots)
        self.failing = None  # one of these
        evaluate = lm_eval.evaluator.evaluate

        def record_call(lm, task_dict, **options):
            for name, task in task_dict["tasks"].items():
                self.calls.append((name, task.get_config("num_fewshot")))
            if self.calls[-1] == self.failing:
                raise ValueError("no")
            return evaluate(lm, task_dict, **options)

        monkeypatch.setattr(lm_eval.evaluator, "evaluate", record_call)

    def repeat(self, *options, runs=None, code=0) -> list[tuple[str, int]]:
        """Evaluate, and return the tasks that were not stored."""
        self.calls.clear()
        options = {"--tasks": "--tasks=questions,gaps", **{o.split("=")[0]: o for o in options}}
        files = (f"--include_path={self.files}", f"--out={self.out}")
        result = run_eval(*(runs or [self.run]), *files, *options.values())
        assert result.code == code, result.error
        self.error = result.error
        return list(self.calls)


BOTH_TASKS = [("questions", 0), ("gaps", 0)]


@pytest.fixture
def evaluation(run, tmp_path, monkeypatch):
    evaluation = Evaluation(run, tmp_path, monkeypatch)
    assert evaluation.repeat() == BOTH_TASKS
    return evaluation


def test_stored_results_are_skipped(evaluation):
    tables = (evaluation.out / "table.md").read_text()
    contents = {path: path.read_text() for path in evaluation.out.glob("results_*.json")}
    assert evaluation.repeat() == []
    assert {path: path.read_text() for path in evaluation.out.glob("results_*.json")} == contents
    assert (evaluation.out / "table.md").read_text() == tables


def test_a_stored_result_has_the_name_that_its_run_has_now(evaluation, tmp_path):
    moved_run = shutil.copytree(evaluation.run, tmp_path / "moved")
    assert evaluation.repeat(runs=[moved_run]) == []
    table = (evaluation.out / "table.md").read_text()
    assert "moved, step 6" in table
    assert "tiny, step 6" not in table


def test_another_task_is_added_to_the_results(evaluation):
    before = read_records(evaluation.out)["0-shot, float32"]
    assert evaluation.repeat("--tasks=letters") == [("letters", 0)]
    after = read_records(evaluation.out)["0-shot, float32"]
    assert after["results"] == {**before["results"], "letters": after["results"]["letters"]}
    assert evaluation.repeat("--tasks=letters,questions,gaps") == []
    table = (evaluation.out / "table.md").read_text()
    assert all(table.count(f"{name} (acc_norm)") == 1 for name in ("letters", "questions", "gaps"))


def test_what_another_command_stores_meanwhile_stays(evaluation, monkeypatch):
    [path] = evaluation.out.glob("results_*.json")
    evaluate = lm_eval.evaluator.evaluate

    def evaluate_while_another_command_writes(lm, task_dict, **options):
        record = json.loads(path.read_text())
        record["results"]["other"] = {"acc,none": 1.0}
        path.write_text(json.dumps(record))
        return evaluate(lm, task_dict, **options)

    monkeypatch.setattr(lm_eval.evaluator, "evaluate", evaluate_while_another_command_writes)
    evaluation.repeat("--tasks=letters")
    record = json.loads(path.read_text())
    assert record["results"].keys() == {"questions", "gaps", "other", "letters"}


@pytest.mark.parametrize(
    ("options", "tasks_evaluated"),
    [
        (["--shots=0,1"], [("questions", 1), ("gaps", 1)]),
        (["--limit=2"], BOTH_TASKS),
        (["--add_bos_token"], BOTH_TASKS),
    ],
)
def test_results_with_other_settings_are_stored_beside_the_first(
    evaluation, options, tasks_evaluated
):
    first_record = read_records(evaluation.out)["0-shot, float32"]
    assert evaluation.repeat(*options) == tasks_evaluated
    records = read_records(evaluation.out)
    assert len(records) == 2
    assert records["0-shot, float32"] == first_record
    assert (evaluation.out / "table.md").read_text().count("###") == 2


def test_only_new_weights_are_evaluated(evaluation):
    earlier = evaluation.run / "checkpoints/step_00000003"
    assert evaluation.repeat(runs=[earlier, evaluation.run]) == BOTH_TASKS
    table = (evaluation.out / "table.md").read_text()
    assert "tiny, step 3" in table
    assert "tiny, step 6" in table


def test_a_task_is_evaluated_again_after_its_file_changed(evaluation):
    file = evaluation.files / "questions.yaml"
    file.write_text(file.read_text().replace("Question:", "Q:"))
    assert evaluation.repeat() == [("questions", 0)]


def test_samples_that_are_missing_are_made(evaluation):
    assert evaluation.repeat("--log_samples") == BOTH_TASKS
    for file in evaluation.out.glob("samples_gaps_*"):
        file.unlink()
    assert evaluation.repeat("--log_samples") == [("gaps", 0)]


def test_an_error_loses_the_running_number_of_shots_alone(evaluation):
    evaluation.failing = ("gaps", 2)
    options = ("--tasks=questions,gaps", "--shots=1,2")
    two_shot = [("questions", 2), ("gaps", 2)]
    assert evaluation.repeat(*options, code=2) == [("questions", 1), ("gaps", 1), *two_shot]
    assert "task gaps, 2-shot, of tiny, step 6: no" in evaluation.error
    evaluation.failing = None
    assert evaluation.repeat(*options) == two_shot


# ---- mistakes ----


def read_own_tasks(include_path, **_):
    """Read no task of lm-eval's own thousands of files, which takes seconds."""
    return TaskManager(include_path=include_path, include_defaults=False)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            "RUN --tasks=question --include_path=TASKS",
            "has a task question, did you mean questions?",
        ),
        ("RUN --tasks=questions --include_path=nowhere", "--include_path=nowhere | no such folder"),
        ("RUN --tasks=questions --shots=1,x", "--shots=1,x | 0,1"),
        ("RUN --tasks=gaps --include_path=TASKS --shots=1,21", "--shots=21, but gaps has only 20"),
        ("RUN --tasks=,", "--tasks | --val"),
        ("RUN --val=no_such_corpus", "no_such_corpus"),
        ("RUN --val=OTHER", "a different tokenizer"),
        ("RUN --val --batch_size=0", "--batch_size=0 | at least 1"),
        ("RUN --tasks=questions --limit=0", "--limit=0 | at least 1"),
        ("RUN --tasks=questions --retry_minutes=-1", "--retry_minutes=-1 | at least 0"),
        ("OTHER --val", "holds no checkpoint"),
        ("EXPORTED --val", "give --val=DATASET"),
    ],
)
def test_mistakes_end_in_one_line_before_any_work(
    run, exported, folder, tmp_path, monkeypatch, arguments, parts
):
    other = tokenizer.train_byte_pairs(["some words of another corpus"] * 9, 260)
    for split in ("train", "val"):
        shards.write_shard(tmp_path / f"a_{split}_000000.bin", np.arange(99) % 250)
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": other.n_vocab}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(other.to_json()))
    paths = {"RUN": run, "EXPORTED": exported, "TASKS": folder, "OTHER": tmp_path}
    for name, path in paths.items():
        arguments = arguments.replace(name, str(path))
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", read_own_tasks)
    line = one_line_error(call("eval.py", *arguments.split(), f"--out={tmp_path / 'out'}"))
    for part in parts.split(" | "):
        assert part in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "old", "new", "cause"),
    [
        ("gaps.yaml", "path: json", "path: nobody/has_this", "nobody/has_this"),
        # lm-eval renders the first item when it loads a task
        ("gaps.yaml", "label", "'{{lable}}'", "UndefinedError: 'lable' is undefined"),
        ("gaps.py", "", "import antlr5\n", "ModuleNotFoundError: No module named 'antlr5'"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_named_and_the_others_are_evaluated(
    run, tmp_path, file, old, new, cause
):
    files = lm_eval_tasks.write_tasks(tmp_path, 3)
    out = tmp_path / "out"
    text = (files / file).read_text()
    (files / file).write_text(text.replace(old, new, 1) if old else new)
    code, output, error = run_eval(
        run, "--tasks=gaps,questions", f"--include_path={files}", f"--out={out}"
    )
    assert code == 3
    [line] = error.strip().splitlines()
    assert "task gaps cannot be loaded (" in line
    assert cause in line
    assert "questions (acc_norm)" in output
    [record] = read_records(out).values()
    assert list(record["tasks"]) == ["questions"]


def test_a_task_file_that_cannot_be_parsed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", read_own_tasks)
    (tmp_path / "mine.yaml").write_text("task: mine\nmetric_list: [{metric: acc}\n")
    with pytest.raises(ValueError, match=r"mine\.yaml cannot be read \((.|\n)*line 3") as error:
        tasks.make_task_manager(["mine"], str(tmp_path))
    assert "has a task mine;" in str(error.value)


def test_the_samples_are_the_file_that_lm_eval_writes(run, tmp_path, monkeypatch):
    """Compare --log_samples with lm-eval's own tracker after its own evaluation of our model."""
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    folder = lm_eval_tasks.write_tasks(tmp_path, 7)
    text = (folder / "continued.yaml").read_text().replace("task: continued", "task: filtered")
    filters = [
        "filter_list:",
        "- {name: one, filter: [{function: take_first}]}",
        "- {name: two, filter: [{function: take_first}]}",
    ]
    (folder / "filtered.yaml").write_text("\n".join([text, *filters]))
    task_names = ["questions", "texts", "continued", "filtered"]
    code, _, error = run_eval(
        run,
        f"--tasks={','.join(task_names)}",
        f"--include_path={folder}",
        "--shots=1",
        "--log_samples",
        f"--out={tmp_path / 'own'}",
    )
    assert code == 0, error
    model, encoding, _ = load_model(run, "cpu")
    results = evaluate_with_lm_eval(language_model(model, 64, encoding), task_names, folder, 1)
    tracker = EvaluationTracker(output_path=str(tmp_path / "expected"))
    tracker.general_config_tracker.log_experiment_args(
        model_source="own",
        model_args=f"pretrained={run}",
        system_instruction="",
        chat_template="",
        fewshot_as_multiturn=False,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in task_names:
        tracker.save_results_samples(task_name=name, samples=samples[name])
        [expected] = (tmp_path / "expected").glob(f"*/samples_{name}_*.jsonl")
        [own] = (tmp_path / "own").glob(f"samples_{name}_*.jsonl")
        assert own.read_text() == expected.read_text()
        first_sample = json.loads(own.read_text().splitlines()[0])
        assert first_sample.keys() >= {"doc_hash", "prompt_hash", "target_hash"}
        # the names differ in the date alone
        assert re.sub(r"\d", "0", own.name) == re.sub(r"\d", "0", expected.name)


# ---- names and tables ----


def find_labels(*paths):
    return [subject.label for subject in subjects.find_all([str(path) for path in paths])]


def test_steps_of_one_run_are_labelled_by_its_name(run):
    step = run / "checkpoints/step_00000003"
    assert find_labels(run, step) == ["tiny, step 6", "tiny, step 3"]


def test_runs_of_one_name_are_labelled_by_their_folders_too(run):
    other = run.parent / "again" / run.name
    shutil.copytree(run, other)
    assert find_labels(run, other) == [f"{run.parent.name}/tiny, step 6", "again/tiny, step 6"]


@pytest.mark.parametrize(
    ("paths", "folder"),
    [
        (["/runs/a"], "/runs/a/eval"),
        (["/runs/a/checkpoints/step_00000003"], "/runs/a/eval"),
        (["/runs/a", "/runs/a/checkpoints/step_00000003"], "/runs/a/eval"),
        (["/runs/a", "/runs/b"], "/runs/eval_a+b"),
        (["/runs/b", "/runs/a/checkpoints/step_00000003"], "/runs/eval_a+b"),
        (["/runs/x/a", "/runs/y/a"], "/runs/eval_x-a+y-a"),
    ],
)
def test_results_are_in_the_run_or_in_a_folder_with_the_names_of_the_runs(paths, folder):
    assert subjects.default_out_folder(paths) == Path(folder)


def test_results_are_beside_an_exported_folder(exported):
    assert subjects.default_out_folder([str(exported)]) == exported.parent / "eval_exported"


def test_sets_of_many_runs_have_short_and_different_folders():
    paths = [f"/runs/seed={seed},learning_rate=0.001" for seed in range(9)]
    names = {subjects.default_out_folder(paths[:count]).name for count in (7, 8, 9)}
    assert len(names) == 3
    assert all(re.fullmatch(r"eval_[789]_runs_[0-9a-f]{8}", name) for name in names)


def test_runs_without_a_common_folder_need_out():
    with pytest.raises(ValueError, match="give --out=FOLDER"):
        subjects.default_out_folder(["/a/run", "/b/run"])


def make_results(value: float) -> dict:
    """Return results of the paper's eight tasks: value, value + 1, ... with errors 1, 2, ..."""
    return {task: (value + number, 1.0 + number) for number, task in enumerate(tasks.PAPER_METRICS)}


MEAN = 30 + 28 / 8
MEAN_ERROR = math.sqrt(sum(number**2 for number in range(1, 9))) / 8
PUBLISHED_MEAN = 48.56


@pytest.fixture(scope="module")
def comparison_table():
    """Return a table of two models, of which the paper has results of the first."""
    paper = published.read_results()["gpt-mha-rope", "small"]["1"]
    rows = [
        comparison.make_task_row("ours_a", make_results(30.0), paper, "said of a"),
        comparison.make_task_row(
            "b", {**make_results(40.0), "arc_easy": (1.5, None)}, {}, "of b ±"
        ),
    ]
    return comparison.make_task_table("1-shot", dict(tasks.PAPER_METRICS), rows)


@pytest.mark.parametrize(
    "part",
    [
        "| ours_a | 30.00 ± 1.00 | 31.00 ± 2.00 |",
        f"{MEAN:.2f} ± {MEAN_ERROR:.2f} |",
        "| published | 29.01 | 55.85 |",
        "| difference | +0.99 ± 1.00 | -24.85 ± 2.00 |",
        f"{MEAN - PUBLISHED_MEAN:+.2f} ± {MEAN_ERROR:.2f} |",
        "| b | 40.00 ± 1.00 | 1.50 |",
    ],
)
def test_a_markdown_table_shows_differences_and_errors(comparison_table, part):
    assert part in " ".join(comparison.format_markdown([comparison_table]).split())


def test_a_markdown_table_ends_with_its_notes(comparison_table):
    text = " ".join(comparison.format_markdown([comparison_table]).split())
    assert text.endswith(f"{comparison.PAPER_NOTE} said of a of b ±")


def test_a_csv_table_has_a_line_for_each_figure(comparison_table):
    lines = list(csv.DictReader(io.StringIO(comparison.format_csv([comparison_table]))))
    assert len(lines) == 2 * 9
    assert lines[0]["column"] == "arc_challenge"
    assert float(lines[0]["difference"]) == pytest.approx(0.99)
    assert float(lines[8]["standard_error"]) == pytest.approx(MEAN_ERROR)
    assert lines[9]["published"] == lines[9]["difference"] == ""


def test_a_latex_table_is_well_formed(comparison_table):
    latex = comparison.format_latex([comparison_table])
    assert latex.count("\\toprule") == latex.count("\\bottomrule") == 1
    assert "ours\\_a & 30.00 $\\pm$ 1.00 & 31.00" in latex
    assert "\n% said of a\n% of b +-\n" in latex
    assert all(line.count("&") == 9 for line in latex.splitlines() if line.endswith("\\\\"))


def test_the_average_needs_all_eight_tasks():
    row = comparison.make_task_row("a", {"piqa": (1, 2)}, {}, "")
    table = comparison.make_task_table("0-shot", {"piqa": "acc_norm"}, [row])
    assert "average" not in comparison.format_markdown([table])


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
        ("winogrande", ACCURACIES, ("acc", 25.0, 10.0)),
        ("other", ACCURACIES, ("acc_norm", 50.0, None)),
        (
            "lambada",
            {"perplexity,none": 12.5, "perplexity_stderr,none": 0.5},
            ("perplexity", 12.5, 0.5),
        ),
        # SQuAD's are percentages already
        ("squad", {"f1,none": 50.5, "f1_stderr,none": "N/A"}, ("f1", 50.5, None)),
    ],
)
def test_the_metric_that_a_table_shows(task, results, expected):
    assert tasks.choose_metric(task, results) == expected


def test_metrics_that_are_no_numbers_are_ignored():
    assert tasks.read_metrics({"alias": "odd", "acc,none": "N/A"}) == {}


def test_a_task_that_is_defined_without_examples_stays_so(tmp_path):
    """A task's num_fewshot of 0 is final for lm-eval; any other number is a default."""
    files = lm_eval_tasks.write_tasks(tmp_path, 2)
    for name, shots in (("questions", 0), ("gaps", 3)):
        with open(files / f"{name}.yaml", "a") as file:
            file.write(f"num_fewshot: {shots}\n")
    loaded, _ = tasks.load_tasks(["questions", "gaps", "endings"], str(files), ALONE)
    for number in (1, 2, 0):
        shots = {}
        for task in loaded:
            tasks.set_num_shots(task, number)
            shots[task.name] = task.tasks[task.name].get_config("num_fewshot")
        assert shots == {"questions": 0, "gaps": number, "endings": number}


def test_paper_stands_for_the_papers_eight_tasks():
    names = eval.parse_tasks(SimpleNamespace(tasks="paper, mine", val=False))
    assert names == [*tasks.PAPER_METRICS, "mine"]
    assert len(names) == 9


@pytest.mark.slow
def test_lm_eval_has_the_papers_tasks_and_metrics():
    manager = tasks.make_task_manager(list(tasks.PAPER_METRICS), None)
    for name, metric in tasks.PAPER_METRICS.items():
        metrics = manager.task_index[name].cfg["metric_list"]
        assert metric in [settings["metric"] for settings in metrics]


def test_a_validation_loss_that_is_not_finite_is_shown_as_nan(tmp_path):
    """Its file has null, as JSON has no nan."""
    path = tmp_path / "results.json"
    scores = {"val_loss": float("nan"), "val_perplexity": float("inf")}
    runner.write_record(path, {"record": scores, "settings": {"limit": None}})
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert record["record"] == {"val_loss": None, "val_perplexity": None}
    row = comparison.make_validation_row("mine", record["record"], {}, "")
    table = comparison.make_validation_table("validation", [row])
    assert [cell for cell in table.rows[0] if cell is not None] == ["mine", "nan", "nan"]


def test_a_continuation_longer_than_block_size_is_scored_in_windows():
    """Each token is scored once; the oracle reads the windows one by one."""
    model = build("gpt-mha-rope", **{**SMALL, "block_size": 8}).eval()
    tokens = torch.randint(0, 256, (25,)).tolist()
    context = tokens[:3]
    [(nats, _)] = language_model(model)._loglikelihood_tokens([(None, context, tokens[3:])])
    expected = 0.0
    for start in (3, 11, 19):
        end = min(start + 8, 25)
        window = torch.tensor([tokens[max(end - 9, 0) : end]])
        scores = model(window[:, :-1])[0].log_softmax(-1)
        nats_of_window = scores.gather(2, window[:, 1:, None]).flatten()
        expected += nats_of_window[-(end - start) :].sum().item()
    assert nats == pytest.approx(expected, rel=1e-5)
