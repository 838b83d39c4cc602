"""eval.py: item by item the numbers of lm-eval's own `hf` model, tables, stores, processes and
mistakes.
"""

import csv
import dataclasses
import io
import json
import math
import re
import shutil

import lm_eval_tasks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract import randomise
from helpers import one_line_error, script, small_run
from in_process import call

from data import shards, tokenizer
from data.shards import open_corpus
from model import STEMS, build

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

ALONE = World(0, 1, torch.device("cpu"))
CHOICES = list(lm_eval_tasks.FORMATS)
TINY = {
    "vocab_size": 328,
    "block_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
}
TINY |= {"hidden_size": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return lm_eval_tasks.write(tmp_path_factory.mktemp("tasks"), 52)


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # which other tests may have imported already
    for package in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{package}.HF_HUB_OFFLINE", True)


def lm_evals_results(language_model, names, folder, shots):
    """As its command line does it."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.evaluator.simple_evaluate(
        language_model,
        tasks=list(names),
        num_fewshot=shots,
        task_manager=manager,
        bootstrap_iters=0,
    )


@pytest.fixture(scope="module")
def encoding(folder):
    """Byte pairs of the tasks' own text: borders between context and choice fall within tokens."""
    return tokenizer.train_byte_pairs(
        [path.read_text() for path in sorted(folder.glob("*.jsonl"))], 320
    )


IN_EVERY_RUN = ("gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC")  # the others take two seconds each


@pytest.mark.parametrize(
    "stem", [s if s in IN_EVERY_RUN else pytest.param(s, marks=pytest.mark.slow) for s in STEMS]
)
def test_every_item_is_what_lm_evals_own_model_makes_of_the_exported_folder(
    folder, encoding, tmp_path, monkeypatch, stem
):
    # seconds of pip list
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    model = randomise(build(stem, **TINY))
    state = {
        "step": 1,
        "seconds": 0.0,
        "model": stem,
        "model_config": dataclasses.asdict(model.config),
    }
    state |= {"run_config": {}, "corpus": {}}
    saved = checkpoint.save(
        tmp_path, checkpoint.weights_of(model), {}, state, tokenizer.to_json(encoding)
    )
    (tmp_path / "exported").mkdir()
    export.write(tmp_path / "exported", "exported", saved, "float32")
    theirs = HFLM(
        str(tmp_path / "exported"),
        trust_remote_code=True,
        device="cpu",
        dtype="float32",
        batch_size=16,
    )
    found_model, found_encoding, _ = subjects.find(str(saved)).load("cpu")
    own = LanguageModel(found_model, found_encoding, ALONE, 16)
    names = [*CHOICES, "texts", "continued"]
    loaded, missing = tasks.open_all(names, str(folder), ALONE)
    assert not missing
    chosen = {name: [] for name in CHOICES}
    for shots in (0, 1):
        wanted = lm_evals_results(theirs, names, folder, shots)
        for task in loaded:
            found = tasks.evaluate(own, task, shots, True, None, True)
            pairs = list(
                zip(found["samples"][task.name], wanted["samples"][task.name], strict=True)
            )
            for mine, other in pairs:
                assert mine["arguments"] == other["arguments"]
                if task.name == "texts":
                    assert mine["resps"][0][0] == pytest.approx(
                        other["resps"][0][0], abs=1e-4, rel=1e-6
                    )
                elif task.name == "continued":
                    assert mine["resps"] == other["resps"]
                else:
                    for (nats, greedy), expected in zip(
                        mine["filtered_resps"], other["filtered_resps"], strict=True
                    ):
                        assert (nats, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
                    assert (mine["acc"], mine["acc_norm"]) == (other["acc"], other["acc_norm"])
                    chosen[task.name].append(
                        np.argmax([nats for nats, _ in mine["filtered_resps"]])
                    )
            for key, value in wanted["results"][task.name].items():
                if "," in key and "stderr" not in key:
                    assert found["results"][task.name][key] == pytest.approx(value, rel=1e-5), key
    assert sum(map(len, chosen.values())) == 2 * 4 * 52
    assert all(len(set(numbers)) > 1 for numbers in chosen.values())


def requests_of(pairs):
    return [lm_eval.api.instance.Instance("loglikelihood", {}, pair, 0) for pair in pairs]


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
        context = [
            *context,
            model(torch.tensor([context[-model.config.block_size :]]))[0][0, -1].argmax().item(),
        ]
    return context[-count:]


@pytest.mark.parametrize(("batch_size", "at_once"), [(1, 2**26), (3, 2**26), (100, 3 * 328)])
def test_awkward_requests_equal_a_naive_loop(monkeypatch, batch_size, at_once):
    # numbers: here of three places
    monkeypatch.setattr("evaluation.language_model.LOGITS_AT_ONCE", at_once)
    model = randomise(build("DDL-gpt-mha-rope-EC", **{**TINY, "block_size": 20})).double().eval()
    with torch.no_grad():
        greedy = likeliest(model, [5, 6, 7], 4)
        pairs = [
            ([5, 6, 7], greedy),
            ([5, 6, 7], greedy[:3]),
            ([5, 6, 7], [*greedy[:3], 9]),
            ([5, 6, 7], greedy[:1]),
        ]
        pairs += [
            ([5, 6, 7], greedy),
            ([256], [1]),
            ([256], list(range(20))),
            (list(range(30)), [1, 2]),
        ]
        pairs += [
            (list(range(30)), [1, 3]),
            (list(range(30)), [1]),
            ([7] * 19, [7, 7]),
            ([7] * 19, [7, 8]),
        ]
        pairs += [
            ([9] * 12, [3] * 7),
            ([9] * 12, [4] * 8),
            ([9] * 3, [4]),
            ([1, 2, 3, 4, 5, 6], [7]),
            ([1, 2, 3], [9]),
        ]
        wanted = [naive(model, *pair) for pair in pairs]
    own = LanguageModel(model, tokenizer.byte_tokenizer(), ALONE, batch_size)
    found = own._loglikelihood_tokens([(None, *pair) for pair in pairs])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [greedy for _, greedy in wanted].count(True) >= 4
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in wanted], abs=1e-9)


@pytest.mark.parametrize("count", [0, 21])
def test_a_continuation_that_cannot_be_scored_is_refused(count):
    own = LanguageModel(
        build("gpt-mha-rope", **{**TINY, "block_size": 20}), tokenizer.byte_tokenizer(), ALONE, 4
    )
    with pytest.raises(ValueError, match=f"a continuation of {count} tokens: .* block_size=20"):
        own._loglikelihood_tokens([(None, [1], [2] * count)])


def test_what_choices_share_is_read_once():
    question, read = [1] * 50, []
    model = build("gpt-mha-rope", **TINY)
    hidden = model.hidden
    model.hidden = lambda ids, *more: read.append(ids.shape) or hidden(ids, *more)
    own = LanguageModel(model, tokenizer.byte_tokenizer(), ALONE, 8)
    own._loglikelihood_tokens([(None, question, [c, c, c]) for c in (2, 3, 4, 5)])
    assert read == [(1, 50), (4, 2)]
    read.clear()
    # a token each: the logits are the same
    own._loglikelihood_tokens([(None, question, [c]) for c in (2, 3, 4, 5)])
    assert read == [(1, 50)]
    read.clear()
    own._loglikelihood_tokens([(None, [c], [1, 2, 3]) for c in (2, 3, 4, 5)])  # nothing to share
    assert read == [(4, 3)]
    read.clear()
    # nothing left to read of the first
    own._loglikelihood_tokens([(None, question, [2]), (None, question, [3, 4, 5])])
    assert read == [(1, 50), (1, 2)]
    read.clear()
    own._loglikelihood_tokens(
        [(None, question, [c, c]) for c in (2, 3)] + [(None, [9] * 30, [c]) for c in (2, 3)]
    )
    # a question that one pass answers is no part of the two
    assert read == [(1, 50), (2, 1), (1, 30)]
    read.clear()
    own._loglikelihood_tokens(
        [(None, question, [c, c]) for c in (2, 3, 4)] + [(None, [*question[:10], *[7] * 30], [8])]
    )
    assert read == [(1, 50), (3, 1), (1, 40)]  # to share ten tokens, three would read forty more


def test_batches_hold_every_request_once_within_the_bounds():
    draw = np.random.default_rng(0)
    wanted = []
    for _ in range(60):
        context = draw.integers(0, 9, draw.integers(1, 60)).tolist()
        for _ in range(draw.integers(1, 6)):
            wanted.append(
                batches.truncated(
                    len(wanted), context, draw.integers(0, 9, draw.integers(1, 9)).tolist(), 48
                )
            )
    for continuation in ([1, 2, 3, 4], [1, 2, 3], [1]):  # each whole within the one before
        wanted.append(batches.truncated(len(wanted), [5] * 9, continuation, 48))
    found = batches.batched(batches.grouped(wanted, 7), 7, 48)
    assert sorted(m.number for batch in found for group in batch for m in group.members) == list(
        range(len(wanted))
    )
    assert max(len(batch) for batch in found) > 1
    for batch in found:
        assert sum(len(group.members) for group in batch) <= 7
        assert max(g.prefix for g in batch) + max(g.rest for g in batch) <= 48
        for group in batch:
            assert len({tuple(m.tokens[: group.prefix]) for m in group.members}) == 1
            assert all(1 <= group.prefix <= m.read for m in group.members)


def test_a_beginning_that_all_share_does_not_make_one_batch(monkeypatch):
    shared = list(range(20))
    wanted = [batches.truncated(n, [*shared, n], [7], 48) for n in range(50)]
    assert [len(group.members) for group in batches.grouped(wanted, 16)] == [16, 16, 16, 2]
    monkeypatch.setattr(batches, "TOKENS_AT_ONCE", 100)
    found = batches.grouped(wanted, 16)
    assert {len(group.members) for group in found[:-1]} == {100 // 21}
    assert {group.prefix for group in found} == {20}


def test_end_of_text_before_every_text():
    own = LanguageModel(
        build("gpt-mha-rope", **TINY), tokenizer.byte_tokenizer(), ALONE, 4, add_bos_token=True
    )
    assert own.tok_encode("ab") == [256, 97, 98]
    assert own.tok_encode("<|endoftext|>ab") == [256, 97, 98]
    assert own.tok_encode("ab", add_special_tokens=False) == [97, 98]
    own.add_bos_token = False
    assert own.tok_encode("ab<|endoftext|>") == [97, 98, 256]


def continued(model, encoding, context: str, count: int) -> str:
    """The likeliest tokens after as much of the context as leaves room, one after the other."""
    tokens = encoding.encode(context, allowed_special="all")[
        -(model.config.block_size - count) :
    ] or [256]
    new: list[int] = []
    for _ in range(count):
        new.append(model(torch.tensor([tokens + new]))[0][0, -1, :257].argmax().item())
    return encoding.decode(new[: new.index(256)] if 256 in new else new, errors="replace")


@pytest.mark.parametrize("batch_size", [1, 5])
def test_generated_text_is_the_likeliest_up_to_a_stop_string(batch_size):
    model = randomise(build("DDL-gpt-mha-rope-CC", **{**TINY, "block_size": 40})).double().eval()
    encoding = tokenizer.byte_tokenizer()
    with torch.no_grad():
        model.transformer.wte.weight[128:] *= 0.3  # rather letters than what is no text
        contexts = [
            "",
            "a",
            "Question: why?\nAnswer:",
            "much longer " * 9,
            "b<|endoftext|>c",
            "Ünder",
            "x y",
            "?",
            "1",
        ]
        texts = [continued(model, encoding, context, 12) for context in contexts]
    stops = [texts[1][4:6], texts[2][2], "never there"]
    settings = {"until": stops, "max_gen_toks": 12}, {"until": stops[2], "max_gen_toks": 12}
    own = LanguageModel(model, encoding, ALONE, batch_size)
    found = own.generate_until(
        requests_of([(context, each) for context in contexts for each in settings])
    )
    assert found[1::2] == texts
    assert found[::2] == [min((text.split(stop)[0] for stop in stops), key=len) for text in texts]
    assert 0 < sum(one != other for one, other in zip(found[::2], texts)) < len(texts)


def test_settings_of_generation():
    sampling, stop, new = generation_settings(
        {"until": "x", "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    )
    assert (sampling.temperature, sampling.top_p, stop, new) == (0.7, 0.9, ["x"], 256)
    assert (
        generation_settings({"do_sample": False, "temperature": 0.7, "max_gen_toks": 3})[
            0
        ].temperature
        == 0
    )
    assert generation_settings({"until": [""], "top_k": 0})[1] == []
    with pytest.raises(ValueError, match="num_beams is not supported"):
        generation_settings({"num_beams": 4})


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A trained run of bytes."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    result = call(
        "train.py",
        *small_run(corpus, out, model="DDL-gpt-mha-rope-CC", block_size=40, learning_rate=0.1),
    )
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
    assert (
        "\nNo published row beside tiny, step 6: tokens of bytes, not GPT-2's; trained on a corpus "
        "that" in out
    )
    assert "| published" not in out
    model, _, _ = load_model(run, "cpu")
    tokens = torch.from_numpy(open_corpus(str(corpus)).val[0].astype(np.int64))
    with torch.no_grad():
        parts = [tokens[start : start + 41] for start in range(0, len(tokens) - 1, 40)]
        nats = sum(
            F.cross_entropy(model(part[None, :-1])[0][0], part[1:], reduction="sum").item()
            for part in parts
        )
    assert entry["tokens"] == len(tokens) - 1
    assert entry["record"]["val_loss"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)
    assert entry["record"]["val_bits_per_byte"] == pytest.approx(
        nats / (len(tokens) - 1) / math.log(2), rel=1e-5
    )
    assert all(entry[key] for key in ("commit", "date", "machine", "command"))


def test_two_processes_write_what_one_writes(run, folder, tmp_path):
    arguments = [
        run,
        "--shots=1",
        f"--tasks={','.join([*CHOICES, 'texts', 'continued'])}",
        "--val",
        "--limit=5",
    ]
    arguments += [f"--include_path={folder}", "--batch_size=4", "--log_samples"]
    code, _, _ = evaluated(*arguments, f"--out={tmp_path / 'one'}")
    assert code == 0
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval.py"]
    result = script(*several, *arguments, f"--out={tmp_path / 'two'}")
    assert result.returncode == 0, result.stderr.decode()
    one, two = entries(tmp_path / "one"), entries(tmp_path / "two")
    assert one.keys() == two.keys()
    assert len(one) == 6 + 1
    for key in one:
        for name in ("results", "record", "digest", "weights"):
            assert one[key].get(name) == two[key].get(name), key
    for name in ("table.md", "table.tex", "table.csv"):
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()
    for key in one.keys() - {("validation", None)}:
        [wanted], [found] = (
            [
                (tmp_path / folder / entries[key]["samples"].replace("TASK", task)).read_text()
                for task in [key[0]]
            ]
            for folder, entries in (("one", one), ("two", two))
        )
        assert found == wanted


def test_finished_results_are_kept_and_what_changed_is_evaluated_anew(run, tmp_path, monkeypatch):
    files = lm_eval_tasks.write(tmp_path, 3)
    arguments = [
        run,
        "--tasks=questions,gaps",
        f"--include_path={files}",
        f"--out={tmp_path / 'out'}",
    ]
    done = []
    evaluate = tasks.evaluate
    monkeypatch.setattr(
        tasks, "evaluate", lambda *args: done.append((args[1].name, args[2])) or evaluate(*args)
    )

    def evaluated_now(*more):
        done.clear()
        code, out, error = evaluated(*arguments, *more)
        assert code == 0, error
        return list(done), out

    found, first = evaluated_now()
    assert found == [("questions", 0), ("gaps", 0)]
    found, again = evaluated_now()
    assert found == []
    assert "0-shot, float32\n" in again
    assert again.partition("0-shot, float32\n")[2].partition("written")[0] in first
    assert evaluated_now("--shots=0,1")[0] == [("questions", 1), ("gaps", 1)]
    lines = (files / "gaps_test.jsonl").read_text().splitlines()
    (files / "gaps_test.jsonl").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    assert evaluated_now()[0] == [("gaps", 0)]
    assert evaluated_now()[0] == []
    task_file = (files / "questions.yaml").read_text()
    (files / "questions.yaml").write_text(task_file.replace("Question:", "Q:"))
    assert evaluated_now()[0] == [("questions", 0)]
    # Another right answer to the same requests.
    (files / "questions.yaml").write_text(
        (files / "questions.yaml").read_text().replace("target: label", "target: 0")
    )
    assert evaluated_now()[0] == [("questions", 0)]
    arguments[:1] = [run / "checkpoints/step_00000003", run]  # other weights, beside the others
    found, out = evaluated_now()
    assert found == [("questions", 0), ("gaps", 0)]
    assert "tiny, step 3" in out
    assert "tiny, step 6" in out
    arguments[:2] = [run]
    assert evaluated_now("--log_samples")[0] == [("questions", 0), ("gaps", 0)]
    for file in (tmp_path / "out").glob("samples_gaps_*"):
        file.unlink()
    assert evaluated_now("--log_samples")[0] == [("questions", 0), ("gaps", 0)][1:]
    assert evaluated_now("--limit=2")[0] == [("questions", 0), ("gaps", 0)]
    assert evaluated_now("--batch_size=3", "--add_bos_token")[0] == [("questions", 0), ("gaps", 0)]


def test_a_task_whose_data_cannot_be_had_is_named_and_the_others_are_evaluated(
    run, folder, tmp_path
):
    arguments = [
        run,
        "--tasks=absent,questions",
        f"--include_path={folder}",
        f"--out={tmp_path}",
        "--limit=2",
    ]
    # Nothing listens there: asked once, not for every task and file.
    result = script(
        "eval.py", *arguments, env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": ""}
    )
    assert result.returncode == 3
    out, [line] = result.stdout.decode(), result.stderr.decode().strip().splitlines()
    assert "task absent" in line
    assert "nobody/has_this" in line
    assert "HF_HOME" in line
    assert "questions (acc_norm)" in out
    assert list(entries(tmp_path)) == [("questions", 0)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--tasks=question", "--include_path=TASKS"],
            ["no task question", "did you mean questions?"],
        ),
        (
            ["--tasks=questions", "--include_path=nowhere"],
            ["--include_path=nowhere", "no such folder"],
        ),
        (["--tasks=questions", "--shots=1,x"], ["--shots=1,x", "0,1"]),
        (["--tasks=,"], ["--tasks", "--val"]),
        (["--val=no_such_corpus"], ["no_such_corpus"]),
        (["--val=OTHER"], ["other tokens"]),
        (["--val", "--batch_size=0"], ["--batch_size=0", "1 or more"]),
        (["--tasks=questions", "--limit=0"], ["--limit=0", "1 or more"]),
        (["--val", "--limit=3"], ["--limit has no effect on --val alone"]),
        (["--val", "--shots=1"], ["--shots has no effect on --val alone"]),
    ],
)
def test_mistakes_end_in_one_line_before_any_work(
    run, folder, tmp_path, monkeypatch, arguments, words
):
    other = tokenizer.train_byte_pairs(["some words of another corpus"] * 9, 260)
    for split in ("train", "val"):
        shards.write_shard(tmp_path / f"a_{split}_000000.bin", np.arange(99) % 250)
    (tmp_path / "meta.json").write_text(json.dumps(tokenizer.meta(other)))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.to_json(other)))
    arguments = [a.replace("TASKS", str(folder)).replace("OTHER", str(tmp_path)) for a in arguments]
    # Without lm-eval's own thousands of files, which take seconds to read.
    monkeypatch.setattr(
        lm_eval.tasks,
        "TaskManager",
        lambda include_path, **_: TaskManager(None, include_path, False),
    )
    code, _, error = evaluated(run, *arguments, f"--out={tmp_path / 'out'}")
    assert code == 2
    [line] = error.strip().splitlines()
    assert all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


def test_an_exported_folder_has_its_runs_numbers_and_needs_a_corpus(run, folder, corpus, tmp_path):
    exported = tmp_path / "exported"
    exported.mkdir()
    export.write(exported, "exported", checkpoint.find(run), "float32")
    arguments = [
        "--tasks=gaps",
        f"--include_path={folder}",
        "--limit=9",
        f"--out={tmp_path / 'out'}",
    ]
    code, _, error = evaluated(exported, *arguments, "--val")
    assert code == 2
    assert "give --val=DATASET" in error
    assert evaluated(run, exported, *arguments, f"--val={corpus}")[0] == 0
    stored = json.loads((tmp_path / "out/results.json").read_text())["entries"]
    assert len(stored) == 4
    for name, key in (("validation", "record"), ("gaps", "results")):
        one, other = (entry[key] for entry in stored if entry["task"] == name)
        assert one == other


def test_groups_without_a_figure_and_tasks_that_fail_leave_the_others_theirs(run, tmp_path):
    files = lm_eval_tasks.write(tmp_path, 3)
    (files / "both.yaml").write_text("group: both\ntask: [questions, gaps]\n")
    text = (
        (files / "continued.yaml")
        .read_text()
        .replace("max_gen_toks: 12", "max_gen_toks: 12, num_beams: 3")
    )
    (files / "beams.yaml").write_text(text.replace("task: continued", "task: beams"))
    arguments = [
        "--tasks=beams,both",
        f"--include_path={files}",
        f"--out={tmp_path / 'out'}",
        "--limit=3",
    ]
    code, out, error = evaluated(run, *arguments)
    assert code == 3
    [line] = error.strip().splitlines()
    assert "task beams, 0-shot, of " in line
    assert "num_beams is not supported" in line
    assert "0-shot, float32, the first 3 items alone\n" in out
    assert list(entries(tmp_path / "out")[("both", 0)]["shown"]) == ["questions", "gaps"]


def test_the_samples_are_the_file_that_lm_eval_writes(run, tmp_path, monkeypatch):
    """Its own evaluation of our model with its own tracker, and eval.py --log_samples: the same
    bytes.
    """
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    folder, names = (
        lm_eval_tasks.write(tmp_path, 7),
        ["questions", "texts", "continued", "filtered"],
    )
    filters = [
        "filter_list:",
        *(f"- {{name: {name}, filter: [{{function: take_first}}]}}" for name in ("one", "two")),
    ]
    text = (folder / "continued.yaml").read_text().replace("task: continued", "task: filtered")
    (folder / "filtered.yaml").write_text("\n".join([text, *filters]))
    arguments = [
        run,
        f"--tasks={','.join(names)}",
        f"--include_path={folder}",
        "--shots=1",
        "--log_samples",
    ]
    assert evaluated(*arguments, f"--out={tmp_path / 'ours'}")[0] == 0
    model, encoding, _ = load_model(run, "cpu")
    results = lm_evals_results(LanguageModel(model, encoding, ALONE, 64), names, folder, 1)
    tracker = EvaluationTracker(output_path=str(tmp_path / "theirs"))
    tracker.general_config_tracker.log_experiment_args("ours", f"pretrained={run}", "", "", False)
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in names:
        tracker.save_results_samples(task_name=name, samples=samples[name])
        [theirs] = (tmp_path / "theirs").glob(f"*/samples_{name}_*.jsonl")
        [ours] = (tmp_path / "ours").glob(f"samples_{name}_*.jsonl")
        assert ours.read_text() == theirs.read_text()
        assert json.loads(ours.read_text().splitlines()[0]).keys() >= {
            "doc_hash",
            "prompt_hash",
            "target_hash",
        }
        assert re.sub(r"\d", "0", ours.name) == re.sub(r"\d", "0", theirs.name)


def test_older_tables_stay_and_grow(run, folder, tmp_path):
    def table(*arguments):
        code, _, error = evaluated(run, f"--include_path={folder}", f"--out={out}", *arguments)
        return (
            code,
            (out / "table.md").read_text(),
            (out / "table.csv").read_text().splitlines(),
            error,
        )

    out = tmp_path / "out"
    code, first, _, _ = table("--tasks=questions,gaps", "--val")
    assert code == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    code, _, _, error = table("--tasks=absent")
    assert code == 3
    assert "task absent" in error
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    # One more task, and other settings: what was there is still there, once.
    code, both, lines, _ = table("--tasks=absent,letters")
    assert code == 3
    for part in ("letters (acc_norm)", "questions (acc_norm)", "gaps (acc_norm)", "### validation"):
        assert both.count(part) == 1
    assert len(lines) == 1 + 3 + 3
    code, tried, lines, _ = table("--tasks=questions", "--limit=2")
    assert code == 0
    assert tried.startswith("### 0-shot, float32, the first 2 items alone\n")
    assert len(lines) == 1 + 3 + 3 + 1
    assert (
        first.splitlines()[4].split("|")[2].strip() in tried.partition("### 0-shot, float32\n")[2]
    )


def test_evaluations_that_write_at_once_keep_each_others_results(tmp_path):
    entry = {"weights": "w", "task": "a", "shots": 0, "settings": {}}
    for each in (entry, entry | {"task": "b"}, entry | {"value": 1}):
        runner.add(tmp_path, each)
    assert runner.stored(tmp_path) == [entry | {"task": "b"}, entry | {"value": 1}]


def test_labels_and_places_of_results(run):
    step = run / "checkpoints/step_00000003"
    assert [subject.label for subject in subjects.find_all([str(run), str(step)])] == [
        "tiny, step 6",
        "tiny, step 3",
    ]
    other = run.parent / "again" / run.name
    shutil.copytree(run, other)
    found = [subject.label for subject in subjects.find_all([str(run), str(other)])]
    assert found == [f"{run.parent.name}/tiny, step 6", "again/tiny, step 6"]
    assert subjects.home([str(step)]) == run / "eval"
    assert subjects.home([str(run), str(other)]) == run.parent / "eval"
    with pytest.raises(ValueError, match="give --out=FOLDER"):
        subjects.home(["/a/run", "/b/run"])


def test_an_unknown_run_is_one_line(tmp_path):
    assert "holds no checkpoint" in one_line_error(call("eval.py", tmp_path, "--val"))


def eight(value: float) -> dict:
    return {task: (value + number, 1.0 + number) for number, task in enumerate(tasks.PAPER_METRICS)}


def test_tables_show_difference_and_error():
    paper = {
        task: value
        for task, (value, _) in published.figures()["small", "1", "gpt-mha-rope"].items()
    }
    models = [
        ("ours_a", eight(30.0), paper, "said of a"),
        ("b", eight(40.0) | {"arc_easy": (1.5, None)}, {}, "of b ±"),
    ]
    table = comparison.of_tasks("1-shot", dict(tasks.PAPER_METRICS), models)
    mean, error = 30 + 28 / 8, math.sqrt(sum(n * n for n in range(1, 9))) / 8
    text = " ".join(comparison.markdown([table]).split())
    assert "| ours_a | 30.00 ± 1.00 | 31.00 ± 2.00 |" in text
    assert f"{mean:.2f} ± {error:.2f} |" in text
    assert "| published | 29.01 | 55.85 |" in text
    assert "| difference | +0.99 ± 1.00 | -24.85 ± 2.00 |" in text
    assert f"{mean - 48.56:+.2f} ± {error:.2f} |" in text
    assert "| b | 40.00 ± 1.00 | 1.50 |" in text
    assert text.endswith(f"{comparison.PAPER_NOTE} said of a of b ±")
    rows = list(csv.DictReader(io.StringIO(comparison.comma_separated([table]))))
    assert len(rows) == 2 * 9
    assert rows[0]["column"] == "arc_challenge"
    assert float(rows[0]["difference"]) == pytest.approx(0.99)
    assert rows[9]["published"] == rows[9]["difference"] == ""
    assert float(rows[8]["standard_error"]) == pytest.approx(error)
    latex = comparison.latex([table])
    assert latex.count("\\toprule") == latex.count("\\bottomrule") == 1
    assert "ours\\_a & 30.00 $\\pm$ 1.00 & 31.00" in latex
    assert "\n% said of a\n% of b +-\n" in latex
    assert all(line.count("&") == 9 for line in latex.splitlines() if line.endswith("\\\\"))
    assert "average" not in comparison.markdown(
        [comparison.of_tasks("0-shot", {"piqa": "acc_norm"}, [("a", {"piqa": (1, 2)}, {}, "")])]
    )


def test_the_metric_that_a_table_shows():
    values = {
        "acc,none": 0.25,
        "acc_stderr,none": 0.1,
        "acc_norm,none": 0.5,
        "acc_norm_stderr,none": "N/A",
        "alias": "x",
    }
    assert tasks.metric_of("winogrande", values) == ("acc", 25.0, 10.0)
    assert tasks.metric_of("other", values) == ("acc_norm", 50.0, None)
    perplexity = {"perplexity,none": 12.5, "perplexity_stderr,none": 0.5}
    assert tasks.metric_of("lambada", perplexity) == ("perplexity", 12.5, 0.5)
    # percent already
    assert tasks.metric_of("squad", {"f1,none": 50.5, "f1_stderr,none": "N/A"}) == (
        "f1",
        50.5,
        None,
    )
    assert tasks.numbers({"alias": "odd", "acc,none": "N/A"}) == {}


def test_bfloat16_is_rounded_and_stored_beside_float32(run, tmp_path):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        assert evaluated(run, "--val", f"--dtype={dtype}", f"--out={tmp_path}")[0] == 0
    for entry in json.loads((tmp_path / "results.json").read_text())["entries"]:
        losses[entry["settings"]["dtype"]] = entry["record"]["val_loss"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bfloat16"] != losses["float32"]


def test_a_task_that_fixes_no_examples_keeps_it(tmp_path):
    files = lm_eval_tasks.write(tmp_path, 2)
    # as lm-eval: 0 is kept, another number is a default
    for name, shots in (("questions", 0), ("gaps", 3)):
        (files / f"{name}.yaml").write_text(
            (files / f"{name}.yaml").read_text() + f"num_fewshot: {shots}\n"
        )
    found, _ = tasks.open_all(["questions", "gaps", "endings"], str(files), ALONE)
    for number in (1, 2, 0):
        shots = {}
        for task in found:
            tasks.prepare(task, number)
            shots[task.name] = task.tasks[task.name].get_config("num_fewshot")
        assert shots == {"questions": 0, "gaps": number, "endings": number}


@pytest.mark.slow
def test_lm_eval_has_the_papers_tasks_and_metrics():
    manager = tasks.find(list(tasks.PAPER_METRICS), None)
    for name, metric in tasks.PAPER_METRICS.items():
        assert metric in [each["metric"] for each in manager.task_index[name].cfg["metric_list"]]
