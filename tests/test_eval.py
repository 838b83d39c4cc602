"""eval.py: item by item the numbers of lm-eval's own `hf` model; tables, stores and mistakes."""

import csv
import dataclasses
import io
import json
import math
import re
import shutil
from pathlib import Path

import lm_eval_tasks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import one_line_error, run_script, small_run
from in_process import call

from data import shards, tokenizer
from data.shards import open_corpus
from model import MODEL_NAMES, build
from model.causality import move_parameters
from model.decoding import Decoder

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
import lm_eval.evaluator
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import export
from evaluation import batches, comparison, published, runner, subjects, tasks
from evaluation.language_model import LanguageModel, generation_settings
from training import checkpoint
from training.checkpoint import load_model
from training.distributed import World
from utils import machine

ALONE = World(0, 1, torch.device("cpu"))
CHOICES = list(lm_eval_tasks.FORMATS)
TINY = {"vocab_size": 328, "block_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"head_dim": 8, "hidden_size": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return lm_eval_tasks.write_tasks(tmp_path_factory.mktemp("tasks"), 52)


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for package in ("huggingface_hub.constants", "datasets.config"):  # imported before, perhaps
        monkeypatch.setattr(f"{package}.HF_HUB_OFFLINE", True)


def lm_evals_results(language_model, names, folder, shots):
    """Evaluate tasks as lm-eval's command line does."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    keys = {"num_fewshot": shots, "task_manager": manager, "bootstrap_iters": 0}
    return lm_eval.evaluator.simple_evaluate(language_model, tasks=list(names), **keys)


@pytest.fixture(scope="module")
def encoding(folder):
    """Byte pairs of the tasks' own text: borders of contexts and choices fall within tokens."""
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    return tokenizer.train_byte_pairs(texts, 320)


def language_model(model, batch_size=4, encoding=None, **keys):
    return LanguageModel(model, encoding or tokenizer.byte_tokenizer(), ALONE, batch_size, **keys)


# ---- the numbers ----

IN_EVERY_RUN = ("gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC")  # the others take two seconds each
SLOW = [s if s in IN_EVERY_RUN else pytest.param(s, marks=pytest.mark.slow) for s in MODEL_NAMES]


@pytest.mark.parametrize("stem", SLOW)
def test_every_item_is_what_lm_evals_own_model_makes_of_the_exported_folder(
    folder, encoding, tmp_path, monkeypatch, stem
):
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # seconds of pip
    model = move_parameters(build(stem, **TINY))
    state = {"step": 1, "seconds": 0.0, "model": stem, "run_config": {}, "corpus": {}}
    state["model_config"] = dataclasses.asdict(model.config)
    weights = checkpoint.get_model_tensors(model)
    saved = checkpoint.save(tmp_path, weights, {}, state, tokenizer.to_json(encoding))
    exported = tmp_path / "exported"
    exported.mkdir()
    export.write(exported, "exported", saved, "float32")
    keys = {"device": "cpu", "dtype": "float32", "batch_size": 16}
    theirs = HFLM(str(exported), trust_remote_code=True, **keys)
    found_model, found_encoding, _ = subjects.find(str(saved)).load("cpu")
    own = language_model(found_model, 16, found_encoding)
    names = [*CHOICES, "texts", "continued"]
    loaded, missing = tasks.load_all(names, str(folder), ALONE)
    assert not missing
    chosen = {name: [] for name in CHOICES}
    for shots in (0, 1):
        wanted = lm_evals_results(theirs, names, folder, shots)
        for task in loaded:
            found = tasks.evaluate(
                own, task, shots, log_samples=True, limit=None, standard_errors=True
            )
            samples = found["samples"][task.name], wanted["samples"][task.name]
            for mine, other in zip(*samples, strict=True):
                assert mine["arguments"] == other["arguments"]
                if task.name == "continued":
                    assert mine["resps"] == other["resps"]
                elif task.name == "texts":
                    nats = mine["resps"][0][0], other["resps"][0][0]
                    assert nats[0] == pytest.approx(nats[1], abs=1e-4, rel=1e-6)
                else:
                    nats, greedy = zip(*mine["filtered_resps"])
                    other_nats, other_greedy = zip(*other["filtered_resps"])
                    assert nats == pytest.approx(other_nats, abs=1e-4)
                    assert greedy == other_greedy
                    assert (mine["acc"], mine["acc_norm"]) == (other["acc"], other["acc_norm"])
                    chosen[task.name].append(np.argmax(nats))
            for key, value in wanted["results"][task.name].items():
                if "," in key and "stderr" not in key:
                    assert found["results"][task.name][key] == pytest.approx(value, rel=1e-5), key
    assert sum(map(len, chosen.values())) == 2 * 4 * 52
    assert all(len(set(numbers)) > 1 for numbers in chosen.values())


def naive(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One request by itself, the whole text read anew for every token, in float64."""
    nats, greedy = 0.0, True
    tokens = [*context, *continuation][-(model.config.block_size + 1) :]
    for place in range(len(tokens) - len(continuation), len(tokens)):
        logits = model(torch.tensor([tokens[:place]]))[0][0, -1]
        nats += F.log_softmax(logits, dim=-1)[tokens[place]].item()
        greedy &= logits.argmax().item() == tokens[place]
    return nats, greedy


def likeliest(model, context: list[int], count: int) -> list[int]:
    for _ in range(count):
        logits = model(torch.tensor([context[-model.config.block_size :]]))[0][0, -1]
        context = [*context, logits.argmax().item()]
    return context[-count:]


@pytest.mark.parametrize(("batch_size", "at_once"), [(1, 2**26), (3, 2**26), (100, 3 * 328)])
def test_awkward_requests_equal_a_naive_loop(monkeypatch, batch_size, at_once):
    """at_once: logits, in the last case those of three places."""
    monkeypatch.setattr("evaluation.language_model.MAX_LOGITS", at_once)
    model = (
        move_parameters(build("DDL-gpt-mha-rope-EC", **{**TINY, "block_size": 20})).double().eval()
    )
    with torch.no_grad():
        start = [5, 6, 7]
        long = list(range(30))
        filled = [7] * 19
        greedy = likeliest(model, start, 4)
        pairs = [(start, greedy), (start, greedy[:3]), (start, [*greedy[:3], 9])]
        pairs += [(start, greedy[:1]), (start, greedy), ([256], [1]), ([256], list(range(20)))]
        pairs += [(long, [1, 2]), (long, [1, 3]), (long, [1]), (filled, [7, 7]), (filled, [7, 8])]
        pairs += [([9] * 12, [3] * 7), ([9] * 12, [4] * 8), ([9] * 3, [4])]
        pairs += [([1, 2, 3, 4, 5, 6], [7]), ([1, 2, 3], [9])]
        wanted = [naive(model, *pair) for pair in pairs]
    own = language_model(model, batch_size)
    scores = own._loglikelihood_tokens([(None, *pair) for pair in pairs])
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in wanted]
    assert [greedy for _, greedy in wanted].count(True) >= 4
    assert [nats for nats, _ in scores] == pytest.approx([nats for nats, _ in wanted], abs=1e-9)


@pytest.mark.parametrize("count", [0, 21])
def test_a_continuation_that_cannot_be_scored_is_refused(count):
    own = language_model(build("gpt-mha-rope", **{**TINY, "block_size": 20}))
    with pytest.raises(ValueError, match=f"a continuation of {count} tokens: .* block_size=20"):
        own._loglikelihood_tokens([(None, [1], [2] * count)])


def test_what_choices_share_is_read_once():
    """Each case lists its passes as (sequences, tokens)."""
    question = [1] * 50
    passes = []
    four = (2, 3, 4, 5)
    model = build("gpt-mha-rope", **TINY)
    hidden = model.hidden
    model.hidden = lambda ids, *more: passes.append(ids.shape) or hidden(ids, *more)
    own = language_model(model, 8)
    of_two = [(question, [c, c]) for c in (2, 3)]
    of_three = [(question, [c, c]) for c in (2, 3, 4)]
    for requests, expected in (
        ([(question, [c, c, c]) for c in four], [(1, 50), (4, 2)]),
        ([(question, [c]) for c in four], [(1, 50)]),  # a token each: the logits are the same
        ([([c], [1, 2, 3]) for c in four], [(4, 3)]),  # nothing to share
        ([(question, [2]), (question, [3, 4, 5])], [(1, 50), (1, 2)]),  # nothing left of the first
        # A question that one pass answers is no part of the two.
        ([*of_two, *(([9] * 30, [c]) for c in (2, 3))], [(1, 50), (2, 1), (1, 30)]),
        # To share ten tokens, three would read forty more.
        ([*of_three, ([*question[:10], *[7] * 30], [8])], [(1, 50), (3, 1), (1, 40)]),
    ):
        passes.clear()
        own._loglikelihood_tokens([(None, *request) for request in requests])
        assert passes == expected


def test_batches_hold_every_request_once_within_the_bounds():
    draw = np.random.default_rng(0)
    requests = []

    def add(context, continuation):
        requests.append(batches.truncate_request(len(requests), context, continuation, 48))

    for _ in range(60):
        context = draw.integers(0, 9, draw.integers(1, 60)).tolist()
        for _ in range(draw.integers(1, 6)):
            add(context, draw.integers(0, 9, draw.integers(1, 9)).tolist())
    for continuation in ([1, 2, 3, 4], [1, 2, 3], [1]):  # each whole within the one before
        add([5] * 9, continuation)
    batched = batches.batch_groups(batches.group_requests(requests, 7), 7, 48)
    indices = sorted(r.index for batch in batched for group in batch for r in group.requests)
    assert indices == list(range(len(requests)))
    assert max(len(batch) for batch in batched) > 1
    for batch in batched:
        assert sum(len(group.requests) for group in batch) <= 7
        assert max(g.prefix_len for g in batch) + max(g.suffix_len for g in batch) <= 48
        for group in batch:
            assert len({tuple(m.tokens[: group.prefix_len]) for m in group.requests}) == 1
            assert all(1 <= group.prefix_len <= m.num_read for m in group.requests)


def test_a_beginning_that_all_share_does_not_make_one_batch(monkeypatch):
    requests = [batches.truncate_request(n, [*range(20), n], [7], 48) for n in range(50)]
    groups = batches.group_requests(requests, 16)
    assert [len(group.requests) for group in groups] == [16, 16, 16, 2]
    monkeypatch.setattr(batches, "MAX_BATCH_TOKENS", 100)
    groups = batches.group_requests(requests, 16)
    assert {len(group.requests) for group in groups[:-1]} == {100 // 21}
    assert {group.prefix_len for group in groups} == {20}


def test_end_of_text_before_every_text():
    own = language_model(build("gpt-mha-rope", **TINY), add_bos_token=True)
    assert own.tok_encode("ab") == own.tok_encode("<|endoftext|>ab") == [256, 97, 98]
    assert own.tok_encode("ab", add_special_tokens=False) == [97, 98]
    own.add_bos_token = False
    assert own.tok_encode("ab<|endoftext|>") == [97, 98, 256]


def continued(model, encoding, context: str, count: int) -> str:
    """Return the most likely tokens after the end of a context, read anew for each of them."""
    max_context = model.config.block_size - count
    new = []
    tokens = encoding.encode(context, allowed_special="all")[-max_context:] or [256]
    for _ in range(count):
        new.append(model(torch.tensor([tokens + new]))[0][0, -1, :257].argmax().item())
    return encoding.decode(new[: new.index(256)] if 256 in new else new)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_generated_text_is_the_likeliest_up_to_a_stop_string(batch_size):
    model = (
        move_parameters(build("DDL-gpt-mha-rope-CC", **{**TINY, "block_size": 40})).double().eval()
    )
    encoding = tokenizer.byte_tokenizer()
    contexts = ["", "a", "Question: why?\nAnswer:", "much longer " * 9, "b<|endoftext|>c"]
    contexts += ["Ünder", "x y", "?", "1"]
    with torch.no_grad():
        model.transformer.wte.weight[128:] *= 0.3  # rather letters than what is no text
        texts = [continued(model, encoding, context, 12) for context in contexts]
    stops = [texts[1][4:6], texts[2][2], "never there"]
    settings = {"until": stops, "max_gen_toks": 12}, {"until": stops[2], "max_gen_toks": 12}
    pairs = [(context, keys) for context in contexts for keys in settings]
    requests = [lm_eval.api.instance.Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    generated = language_model(model, batch_size, encoding).generate_until(requests)
    stopped = generated[::2]
    assert generated[1::2] == texts
    assert stopped == [min((text.split(stop)[0] for stop in stops), key=len) for text in texts]
    assert 0 < sum(one != other for one, other in zip(stopped, texts)) < len(texts)


def test_many_batches_share_one_compiled_decoder(monkeypatch):
    """It has as many rows as the largest batch, and gives the texts that each batch's own gives."""
    model = (
        move_parameters(build("DDL-gpt-mha-rope-CC", **{**TINY, "block_size": 40})).double().eval()
    )
    requests = [
        lm_eval.api.instance.Instance("generate_until", {}, (context, {"max_gen_toks": 5}), 0)
        for context in ("a", "Question: why?", "x y z", "", "much longer " * 5)
    ]
    texts = language_model(model, 2, tokenizer.byte_tokenizer()).generate_until(requests)
    sizes = []

    def make_decoder(model, batch_size, length, compiled=False):
        sizes.append((batch_size, length, compiled))
        return Decoder(model, batch_size, length)  # compiling it takes seconds

    monkeypatch.setattr("evaluation.language_model.Decoder", make_decoder)
    monkeypatch.setattr(machine, "MIN_STEPS_TO_COMPILE", 15)  # of three batches
    shared = language_model(model, 2, tokenizer.byte_tokenizer()).generate_until(requests)
    assert sizes == [(2, 40, True)]
    assert shared == texts


def test_settings_of_generation():
    drawn = {"until": "x", "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    sampling, stop, new = generation_settings(drawn)
    assert (sampling.temperature, sampling.top_p, stop, new) == (0.7, 0.9, ["x"], 256)
    greedy = {"do_sample": False, "temperature": 0.7, "max_gen_toks": 3}
    assert generation_settings(greedy)[0].temperature == 0
    assert generation_settings({"until": [""], "top_k": 0})[1] == []
    with pytest.raises(ValueError, match="num_beams is not supported"):
        generation_settings({"num_beams": 4})


# ---- the command ----


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A trained run of bytes."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    keys = {"model": "DDL-gpt-mha-rope-CC", "block_size": 40, "learning_rate": 0.1}
    result = call("train.py", *small_run(corpus, out, **keys))
    assert result.returncode == 0, result.stderr.decode()
    return out


def evaluated(*arguments) -> tuple[int, str, str]:
    """eval.py in this process: exit code, output and errors."""
    result = call("eval.py", *arguments)
    return result.returncode, result.stdout.decode(), result.stderr.decode()


def entries(out) -> dict:
    stored = json.loads((out / "results.json").read_text())["entries"]
    return {(entry["task"], entry["shots"]): entry for entry in stored}


def test_the_whole_validation_split_as_training_measured_it(run, corpus, tmp_path):
    code, out, _ = evaluated(run, "--val", f"--out={tmp_path}")
    assert code == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    entry = entries(tmp_path)["validation", None]
    for key in ("val_loss", "val_perplexity", "val_bits_per_byte"):
        assert entry["record"][key] == pytest.approx(last[key], rel=1e-6)
        assert f"{entry['record'][key]:.4f}" in out
    assert "\nThe paper reports no results for tiny, step 6 (" in out
    assert "| published" not in out
    model, _, _ = load_model(run, "cpu")
    tokens = torch.from_numpy(open_corpus(str(corpus)).val[0].astype(np.int64))
    nats = 0.0
    with torch.no_grad():
        for part in [tokens[start : start + 41] for start in range(0, len(tokens) - 1, 40)]:
            logits = model(part[None, :-1])[0][0]
            nats += F.cross_entropy(logits, part[1:], reduction="sum").item()
    assert entry["tokens"] == len(tokens) - 1
    mean = nats / (len(tokens) - 1)
    record = entry["record"]["val_loss"], entry["record"]["val_bits_per_byte"]
    assert record == pytest.approx((mean, mean / math.log(2)), rel=1e-5)
    assert all(entry[key] for key in ("commit", "date", "machine", "command"))


def test_two_processes_write_what_one_writes(run, folder, tmp_path):
    names = ",".join([*CHOICES, "texts", "continued"])
    arguments = [run, "--shots=1", f"--tasks={names}", "--val", "--limit=5"]
    arguments += [f"--include_path={folder}", "--batch_size=4", "--log_samples"]
    assert evaluated(*arguments, f"--out={tmp_path / 'one'}")[0] == 0
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval.py"]
    result = run_script(*several, *arguments, f"--out={tmp_path / 'two'}")
    assert result.returncode == 0, result.stderr.decode()
    one = entries(tmp_path / "one")
    two = entries(tmp_path / "two")
    assert one.keys() == two.keys()
    assert len(one) == 6 + 1
    files = ["table.md", "table.tex", "table.csv"]
    for key, entry in one.items():
        for name in ("results", "record", "digest", "weights"):
            assert entry.get(name) == two[key].get(name), key
        if key != ("validation", None):
            names = [each[key]["samples"].replace("TASK", key[0]) for each in (one, two)]
            texts = [(tmp_path / n / name).read_text() for n, name in zip(("one", "two"), names)]
            assert texts[0] == texts[1]
    for name in files:
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()


def test_finished_results_stay_and_what_changed_is_evaluated_anew(run, tmp_path, monkeypatch):
    files = lm_eval_tasks.write_tasks(tmp_path, 3)
    out = tmp_path / "out"
    options = ["--tasks=questions,gaps", f"--include_path={files}", f"--out={out}"]
    both = ["questions", "gaps"]
    calls = []  # (name of the task, number of shots)
    evaluate = tasks.evaluate

    def counted(language_model, task, num_shots, **options):
        calls.append((task.name, num_shots))
        return evaluate(language_model, task, num_shots, **options)

    monkeypatch.setattr(tasks, "evaluate", counted)

    def evaluated_now(*more, runs=(run,), shots=0):
        """Return the names of the tasks that were evaluated, and what was printed."""
        calls.clear()
        code, out, error = evaluated(*runs, *options, *more)
        assert code == 0, error
        assert {num_shots for _, num_shots in calls} <= {shots}
        return [name for name, _ in calls], out

    def edit(name, old, new):
        (files / name).write_text((files / name).read_text().replace(old, new))

    names, first = evaluated_now()
    assert names == both
    names, again = evaluated_now()
    assert names == []
    assert again.partition("0-shot, float32\n")[2].partition("written")[0] in first
    assert evaluated_now("--shots=0,1", shots=1)[0] == both
    lines = (files / "gaps_test.jsonl").read_text().splitlines()
    (files / "gaps_test.jsonl").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    assert evaluated_now()[0] == ["gaps"]
    edit("questions.yaml", "Question:", "Q:")
    assert evaluated_now()[0] == ["questions"]
    edit("questions.yaml", "target: label", "target: 0")  # another answer to the same requests
    assert evaluated_now()[0] == ["questions"]
    names, out_text = evaluated_now(runs=(run / "checkpoints/step_00000003", run))
    assert names == both  # of other weights, beside the others
    assert "tiny, step 3" in out_text
    assert "tiny, step 6" in out_text
    assert evaluated_now("--log_samples")[0] == both
    for file in out.glob("samples_gaps_*"):
        file.unlink()
    assert evaluated_now("--log_samples")[0] == ["gaps"]
    assert evaluated_now("--limit=2")[0] == both
    assert evaluated_now("--batch_size=3", "--add_bos_token")[0] == both


def test_a_task_whose_data_cannot_be_had_is_named_and_the_others_are_evaluated(
    run, folder, tmp_path
):
    options = ["--tasks=absent,questions", f"--include_path={folder}", f"--out={tmp_path}"]
    # Nothing listens there: asked once, not for every task and file.
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": ""}
    result = run_script("eval.py", run, *options, "--limit=2", env=environment)
    assert result.returncode == 3
    [line] = result.stderr.decode().strip().splitlines()
    assert all(word in line for word in ("task absent", "nobody/has_this", "HF_HOME"))
    assert "questions (acc_norm)" in result.stdout.decode()
    assert list(entries(tmp_path)) == [("questions", 0)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tasks=question --include_path=TASKS", "no task question | did you mean questions?"),
        ("--tasks=questions --include_path=nowhere", "--include_path=nowhere | no such folder"),
        ("--tasks=questions --shots=1,x", "--shots=1,x | 0,1"),
        ("--tasks=,", "--tasks | --val"),
        ("--val=no_such_corpus", "no_such_corpus"),
        ("--val=OTHER", "another tokenizer"),
        ("--val --batch_size=0", "--batch_size=0 | 1 or more"),
        ("--tasks=questions --limit=0", "--limit=0 | 1 or more"),
        ("--val --limit=3", "--limit has no effect with --val alone"),
        ("--val --shots=1", "--shots has no effect with --val alone"),
    ],
)
def test_mistakes_end_in_one_line_before_any_work(
    run, folder, tmp_path, monkeypatch, arguments, words
):
    other = tokenizer.train_byte_pairs(["some words of another corpus"] * 9, 260)
    for split in ("train", "val"):
        shards.write_shard(tmp_path / f"a_{split}_000000.bin", np.arange(99) % 250)
    (tmp_path / "meta.json").write_text(json.dumps(tokenizer.meta_entries(other)))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.to_json(other)))
    arguments = arguments.replace("TASKS", str(folder)).replace("OTHER", str(tmp_path)).split()
    # Without lm-eval's own thousands of files, which take seconds to read.
    few = lambda include_path, **_: TaskManager(None, include_path, False)  # noqa: E731
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", few)
    code, _, error = evaluated(run, *arguments, f"--out={tmp_path / 'out'}")
    assert code == 2
    [line] = error.strip().splitlines()
    assert all(word in line for word in words.split(" | ")), line
    assert not (tmp_path / "out").exists()
    assert "holds no checkpoint" in one_line_error(call("eval.py", tmp_path, "--val"))


def test_an_exported_folder_has_its_runs_numbers_and_needs_a_corpus(run, folder, corpus, tmp_path):
    exported = tmp_path / "exported"
    out = tmp_path / "out"
    exported.mkdir()
    export.write(exported, "exported", checkpoint.find(run), "float32")
    options = ["--tasks=gaps", f"--include_path={folder}", "--limit=9", f"--out={out}"]
    code, _, error = evaluated(exported, *options, "--val")
    assert code == 2
    assert "give --val=DATASET" in error
    assert evaluated(run, exported, *options, f"--val={corpus}")[0] == 0
    stored = json.loads((out / "results.json").read_text())["entries"]
    assert len(stored) == 4
    for name, key in (("validation", "record"), ("gaps", "results")):
        one, other = (entry[key] for entry in stored if entry["task"] == name)
        assert one == other


def test_groups_without_a_figure_and_tasks_that_fail_leave_the_others_theirs(run, tmp_path):
    files = lm_eval_tasks.write_tasks(tmp_path, 3)
    out = tmp_path / "out"
    (files / "both.yaml").write_text("group: both\ntask: [questions, gaps]\n")
    text = (files / "continued.yaml").read_text().replace("task: continued", "task: beams")
    beams = text.replace("max_gen_toks: 12", "max_gen_toks: 12, num_beams: 3")
    (files / "beams.yaml").write_text(beams)
    options = ["--tasks=beams,both", f"--include_path={files}", f"--out={out}", "--limit=3"]
    code, printed, error = evaluated(run, *options)
    assert code == 3
    [line] = error.strip().splitlines()
    assert "task beams, 0-shot, of " in line
    assert "num_beams is not supported" in line
    assert "0-shot, float32, only the first 3 items\n" in printed
    assert list(entries(out)["both", 0]["shown"]) == ["questions", "gaps"]


def test_the_samples_are_the_file_that_lm_eval_writes(run, tmp_path, monkeypatch):
    """Its own evaluation of our model with its own tracker, and --log_samples: the same bytes."""
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    folder = lm_eval_tasks.write_tasks(tmp_path, 7)
    names = ["questions", "texts", "continued"]
    filters = [f"- {{name: {n}, filter: [{{function: take_first}}]}}" for n in ("one", "two")]
    text = (folder / "continued.yaml").read_text().replace("task: continued", "task: filtered")
    (folder / "filtered.yaml").write_text("\n".join([text, "filter_list:", *filters]))
    names.append("filtered")
    options = [f"--tasks={','.join(names)}", f"--include_path={folder}", "--shots=1"]
    assert evaluated(run, *options, "--log_samples", f"--out={tmp_path / 'ours'}")[0] == 0
    model, encoding, _ = load_model(run, "cpu")
    results = lm_evals_results(language_model(model, 64, encoding), names, folder, 1)
    tracker = EvaluationTracker(output_path=str(tmp_path / "theirs"))
    tracker.general_config_tracker.log_experiment_args("ours", f"pretrained={run}", "", "", False)
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in names:
        tracker.save_results_samples(task_name=name, samples=samples[name])
        [theirs] = (tmp_path / "theirs").glob(f"*/samples_{name}_*.jsonl")
        [ours] = (tmp_path / "ours").glob(f"samples_{name}_*.jsonl")
        assert ours.read_text() == theirs.read_text()
        first = json.loads(ours.read_text().splitlines()[0])
        assert first.keys() >= {"doc_hash", "prompt_hash", "target_hash"}
        assert re.sub(r"\d", "0", ours.name) == re.sub(r"\d", "0", theirs.name)


# ---- stores and tables ----


def test_older_tables_stay_and_grow(run, folder, tmp_path):
    out = tmp_path / "out"

    def table(expected, *arguments):
        code, _, error = evaluated(run, f"--include_path={folder}", f"--out={out}", *arguments)
        assert code == expected, error
        return (out / "table.md").read_text(), len((out / "table.csv").read_text().splitlines())

    first, _ = table(0, "--tasks=questions,gaps", "--val")
    contents = {path: path.read_bytes() for path in out.iterdir()}
    table(3, "--tasks=absent")
    assert {path: path.read_bytes() for path in out.iterdir()} == contents
    # One more task, and other settings: what was there is still there, once.
    both, lines = table(3, "--tasks=absent,letters")
    for part in ("letters (acc_norm)", "questions (acc_norm)", "gaps (acc_norm)", "### validation"):
        assert both.count(part) == 1
    assert lines == 1 + 3 + 3
    tried, lines = table(0, "--tasks=questions", "--limit=2")
    assert tried.startswith("### 0-shot, float32, only the first 2 items\n")
    assert lines == 1 + 3 + 3 + 1
    figure = first.splitlines()[4].split("|")[2].strip()
    assert figure in tried.partition("### 0-shot, float32\n")[2]


def test_evaluations_that_write_at_once_keep_each_others_results(tmp_path):
    entry = {"weights": "w", "task": "a", "shots": 0, "settings": {}}
    other_task = {**entry, "task": "b"}
    replacement = {**entry, "value": 1}
    for new_entry in (entry, other_task, replacement):
        runner.add_entry(tmp_path, new_entry)
    assert runner.read_entries(tmp_path) == [other_task, replacement]


def test_labels_of_runs_and_checkpoints(run):
    def labels(*paths):
        return [subject.label for subject in subjects.find_all([str(path) for path in paths])]

    step = run / "checkpoints/step_00000003"
    other = run.parent / "again" / run.name
    shutil.copytree(run, other)
    assert labels(run, step) == ["tiny, step 6", "tiny, step 3"]
    assert labels(run, other) == [f"{run.parent.name}/tiny, step 6", "again/tiny, step 6"]


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


def test_sets_of_many_runs_have_short_and_different_folders():
    paths = [f"/runs/seed={seed},learning_rate=0.001" for seed in range(9)]
    names = {subjects.default_out_folder(paths[:count]).name for count in (7, 8, 9)}
    assert len(names) == 3
    assert all(re.fullmatch(r"eval_[789]_runs_[0-9a-f]{8}", name) for name in names)


def test_runs_without_a_common_folder_need_out():
    with pytest.raises(ValueError, match="give --out=FOLDER"):
        subjects.default_out_folder(["/a/run", "/b/run"])


def eight(value: float) -> dict:
    return {task: (value + number, 1.0 + number) for number, task in enumerate(tasks.PAPER_METRICS)}


def test_tables_show_difference_and_error():
    paper = published.read_results()["gpt-mha-rope", "small"]["1"]
    other = {**eight(40.0), "arc_easy": (1.5, None)}
    rows = [
        comparison.make_task_row("ours_a", eight(30.0), paper, "said of a"),
        comparison.make_task_row("b", other, {}, "of b ±"),
    ]
    table = comparison.make_task_table("1-shot", dict(tasks.PAPER_METRICS), rows)
    mean = 30 + 28 / 8
    error = math.sqrt(sum(n * n for n in range(1, 9))) / 8
    text = " ".join(comparison.format_markdown([table]).split())
    for part in (
        "| ours_a | 30.00 ± 1.00 | 31.00 ± 2.00 |",
        f"{mean:.2f} ± {error:.2f} |",
        "| published | 29.01 | 55.85 |",
        "| difference | +0.99 ± 1.00 | -24.85 ± 2.00 |",
        f"{mean - 48.56:+.2f} ± {error:.2f} |",
        "| b | 40.00 ± 1.00 | 1.50 |",
    ):
        assert part in text
    assert text.endswith(f"{comparison.PAPER_NOTE} said of a of b ±")
    lines = list(csv.DictReader(io.StringIO(comparison.format_csv([table]))))
    assert len(lines) == 2 * 9
    assert lines[0]["column"] == "arc_challenge"
    assert float(lines[0]["difference"]) == pytest.approx(0.99)
    assert lines[9]["published"] == lines[9]["difference"] == ""
    assert float(lines[8]["standard_error"]) == pytest.approx(error)
    latex = comparison.format_latex([table])
    assert latex.count("\\toprule") == latex.count("\\bottomrule") == 1
    assert "ours\\_a & 30.00 $\\pm$ 1.00 & 31.00" in latex
    assert "\n% said of a\n% of b +-\n" in latex
    assert all(line.count("&") == 9 for line in latex.splitlines() if line.endswith("\\\\"))


def test_the_average_needs_all_eight_tasks():
    row = comparison.make_task_row("a", {"piqa": (1, 2)}, {}, "")
    table = comparison.make_task_table("0-shot", {"piqa": "acc_norm"}, [row])
    assert "average" not in comparison.format_markdown([table])


def test_the_metric_that_a_table_shows():
    values = {"acc,none": 0.25, "acc_stderr,none": 0.1, "acc_norm,none": 0.5, "alias": "x"}
    values["acc_norm_stderr,none"] = "N/A"
    perplexity = {"perplexity,none": 12.5, "perplexity_stderr,none": 0.5}
    percent = {"f1,none": 50.5, "f1_stderr,none": "N/A"}  # already
    for task, figures, expected in (
        ("winogrande", values, ("acc", 25.0, 10.0)),
        ("other", values, ("acc_norm", 50.0, None)),
        ("lambada", perplexity, ("perplexity", 12.5, 0.5)),
        ("squad", percent, ("f1", 50.5, None)),
    ):
        assert tasks.choose_metric(task, figures) == expected
    assert tasks.read_metrics({"alias": "odd", "acc,none": "N/A"}) == {}


def test_bfloat16_is_rounded_and_stored_beside_float32(run, tmp_path):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        assert evaluated(run, "--val", f"--dtype={dtype}", f"--out={tmp_path}")[0] == 0
    for entry in json.loads((tmp_path / "results.json").read_text())["entries"]:
        losses[entry["settings"]["dtype"]] = entry["record"]["val_loss"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bfloat16"] != losses["float32"]


def test_a_task_that_fixes_no_examples_keeps_it(tmp_path):
    """lm-eval keeps a 0 in the file of a task, and takes any other number as a default."""
    files = lm_eval_tasks.write_tasks(tmp_path, 2)
    for name, shots in (("questions", 0), ("gaps", 3)):
        with open(files / f"{name}.yaml", "a") as file:
            file.write(f"num_fewshot: {shots}\n")
    loaded, _ = tasks.load_all(["questions", "gaps", "endings"], str(files), ALONE)
    for number in (1, 2, 0):
        shots = {}
        for task in loaded:
            tasks.set_num_shots(task, number)
            shots[task.name] = task.tasks[task.name].get_config("num_fewshot")
        assert shots == {"questions": 0, "gaps": number, "endings": number}


@pytest.mark.slow
def test_lm_eval_has_the_papers_tasks_and_metrics():
    manager = tasks.find(list(tasks.PAPER_METRICS), None)
    for name, metric in tasks.PAPER_METRICS.items():
        assert metric in [each["metric"] for each in manager.task_index[name].cfg["metric_list"]]
