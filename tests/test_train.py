"""Test train.py as a user runs it: metrics, resuming, and the settings of a run."""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, SMALL, configure, one_line_error, run_script, small_run
from in_process import call
from training_runs import (
    CONSTANT_RATE,
    change_saved_state,
    completed_steps,
    read_state,
    read_weights,
    run_train,
    training_error,
)

import model_folder
import train
from data import shards
from data.loader import TrainBatches, ValidationBatches
from model import build, cost
from model.gpt import GPTConfig
from training import checkpoint, distributed, metrics, settings, setup, stopping
from training.validation import evaluate
from utils.machine import can_compile
from utils.processes import World
from utils.units import format_bytes


@pytest.fixture(scope="module")
def finished_run(corpus, tmp_path_factory) -> Path:
    """Train a run of six steps."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    run_train(*small_run(corpus, folder, eval_full=True))
    return folder


@pytest.fixture
def branch(finished_run, tmp_path) -> Path:
    """Copy the finished run, for a test that changes or continues it."""
    return shutil.copytree(finished_run, tmp_path / "branch")


def read_step_records(run: Path) -> list[dict]:
    return [record for record in metrics.read(run / "metrics.jsonl") if "loss" in record]


# ---- what a run computes and prints ----


def test_every_step_and_every_evaluation_has_a_record(finished_run):
    records = read_step_records(finished_run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["tokens"] for record in records] == [64 * step for step in range(1, 7)]
    assert [record["lr"] for record in records][:2] == [0.005, 0.01]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(records))
    assert records[0]["flops"] == 64 * cost.flops_per_token(build("DDL-gpt-mha-rope", **SMALL))
    records = metrics.read(finished_run / "metrics.jsonl")
    evaluations = [(r["step"], r["val_sequences"]) for r in records if "val_loss" in r]
    assert evaluations == [(3, 8), (6, 150)]  # 2 batches of 4, then ceil(2388 / 16)


class PlainLoop(NamedTuple):
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain_loop(corpus) -> PlainLoop:
    """Train as the finished run does, with clipping, AdamW, warmup and cosine written out."""
    torch.manual_seed(0)
    model = build("DDL-gpt-mha-rope", **SMALL)
    batches = TrainBatches(shards.open_corpus(str(corpus)).train, 16, 4, 0)
    first_moments = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    second_moments = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    losses = []
    grad_norms = []
    for step in range(6):
        ids, targets = batches.get(step, 0, 4)
        loss = F.cross_entropy(model(ids)[0].flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
        losses.append(loss.item())
        grad_norms.append(norm)
        cosine = 0.0005 + 0.0095 * (1 + math.cos(math.pi * (step - 1) / 4)) / 2
        lr = [0.005, 0.01, cosine][min(step, 2)]
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = p.grad * min(1.0, 1.0 / norm)
                m = first_moments[name]
                v = second_moments[name]
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.05)
                p.mul_(1 - lr * (0.1 if p.ndim >= 2 else 0.0))
                corrected = (v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
                p.sub_(lr * m / (1 - 0.9 ** (step + 1)) / corrected)
    return PlainLoop(losses, grad_norms, model.state_dict())


def test_training_equals_a_plain_loop(finished_run, plain_loop):
    records = read_step_records(finished_run)
    losses = [record["loss"] for record in records]
    grad_norms = [record["grad_norm"] for record in records]
    assert losses == pytest.approx(plain_loop.losses, rel=0, abs=2e-5)
    assert max(plain_loop.grad_norms) > 1  # so that gradients are clipped
    assert grad_norms == pytest.approx(plain_loop.grad_norms, rel=1e-3)
    for name, value in read_weights(finished_run).items():
        expected = plain_loop.weights[name]
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=2e-4)


@pytest.fixture(scope="module")
def validation_losses(finished_run, corpus) -> list[float]:
    """Return the mean loss of each sequence of the validation split, one forward pass for each."""
    model, _, _ = model_folder.load_model(finished_run, "cpu")
    tokens = torch.from_numpy(shards.open_corpus(str(corpus)).val[0].astype("int64"))
    losses = []
    with torch.no_grad():
        for first in range(0, len(tokens) - 1, 16):
            sequence = tokens[first : first + 17]
            losses.append(F.cross_entropy(model(sequence[None, :-1])[0][0], sequence[1:]).item())
    return losses


# 149 sequences have 16 targets, the last one 4
VALIDATION_TARGETS = [16] * 149 + [4]


def test_the_last_evaluation_covers_every_token(finished_run, validation_losses):
    mean = np.average(validation_losses, weights=VALIDATION_TARGETS)
    last = metrics.read(finished_run / "metrics.jsonl")[-1]
    assert last["val_loss"] == pytest.approx(mean, rel=1e-5)
    assert last["val_bits_per_byte"] == pytest.approx(mean / math.log(2), rel=1e-5)
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]))


def test_one_half_of_the_validation_split_is_evaluated_alone(validation_losses, corpus, tmp_path):
    run_train(*small_run(corpus, tmp_path, eval_part="second", eval_full=True))
    last = metrics.find_evaluation(tmp_path / "metrics.jsonl")
    mean = np.average(validation_losses[75:], weights=VALIDATION_TARGETS[75:])
    assert last["val_sequences"] == 75
    assert last["val_loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.skipif(not can_compile(), reason="no C++ compiler")
def test_compiled_blocks_train_like_a_run_that_is_not_compiled(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    num_graphs = {}
    losses = {}
    for choice in (False, "blocks"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        out = tmp_path / str(choice)
        run_train(*small_run(corpus, out, compile=choice, max_steps=3, eval_full=True))
        num_graphs[choice] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        losses[choice] = metrics.find_evaluation(out / "metrics.jsonl")["val_loss"]
    assert num_graphs[False] == 0 < num_graphs["blocks"]
    assert losses["blocks"] == pytest.approx(losses[False], rel=1e-6)


def test_a_decay_may_begin_after_the_warmup(corpus, tmp_path):
    # of six steps, two are the warmup
    config, _ = configure(small_run(corpus, tmp_path, schedule="wsd", decay_steps=4))
    assert config.decay_steps == 4


def test_modules_are_in_evaluation_mode_where_nothing_is_trained(corpus, tmp_path, monkeypatch):
    modes = []

    def record_mode(module, name: str) -> None:
        function = getattr(module, name)

        def recorded(model, *arguments, **keys):
            modes.append((name, model.training))
            return function(model, *arguments, **keys)

        monkeypatch.setattr(module, name, recorded)

    record_mode(train, "evaluate")
    record_mode(train, "compute_residual_statistics")
    record_mode(distributed, "clip_grad_norm")
    keys = {"max_steps": 2, "eval_interval": 1, "statistics_interval": 1}
    run_train(*small_run(corpus, tmp_path / "run", **keys))
    assert modes == 2 * [
        ("clip_grad_norm", True),
        ("compute_residual_statistics", False),
        ("evaluate", False),
    ]


# ---- resuming ----


def test_keys_newer_than_a_checkpoint_count_as_their_default(branch, corpus):
    def remove_keys(state: dict) -> None:
        del state["run_config"]["beta2"]
        del state["model_config"]["rope_base"]

    change_saved_state(branch, remove_keys)
    arguments = small_run(corpus, branch, resume="auto")
    assert "nothing to train" in run_train(*arguments)
    assert "was trained with beta2=0.95 (not 0.99)" in training_error(*arguments, "--beta2=0.99")


def test_a_resumed_run_takes_what_is_not_given_from_the_run(branch):
    first = read_state(branch)
    printed = run_train(f"--out_dir={branch}", "--resume=auto", "--max_steps=7")
    assert "note: this command changes max_steps=7 (not 6)" in printed
    state = read_state(branch)
    assert state["model"] == first["model"]
    assert state["model_config"] == first["model_config"]
    changed = {"max_steps": 7, "out_dir": str(branch), "resume": "auto"}
    assert state["run_config"] == {**first["run_config"], **changed}


@pytest.mark.parametrize("key", ["eval_part=second", "eval_batches=3"])
def test_the_best_loss_is_forgotten_if_other_sequences_are_evaluated(branch, key):
    change_saved_state(branch, lambda state: state.update(best_val_loss=0.5))
    # the evaluation of the last step came after its checkpoint
    lines = (branch / "metrics.jsonl").read_text()
    lines = re.sub(r'"best_val_loss": [\d.]+', '"best_val_loss": 0.5', lines)
    (branch / "metrics.jsonl").write_text(lines)
    keys = ["--max_steps=7", "--eval_full=False", f"--{key}"]
    run_train(f"--out_dir={branch}", "--resume=auto", *keys)
    last = metrics.find_evaluation(branch / "metrics.jsonl")
    assert last["best_val_loss"] == last["val_loss"]


def test_the_settings_of_a_resumed_run_overrule_its_config_file(branch, tmp_path):
    saved_config, saved_model_config = configure([f"--out_dir={branch}", "--resume=auto"])
    (tmp_path / "small.py").write_text(
        "max_steps = 9\nlearning_rate = 0.5\nhidden_size = 24\nmodel = 'gpt-mha-rope'\n"
    )
    arguments = [str(tmp_path / "small.py"), f"--out_dir={branch}", "--resume=auto"]
    resolved = settings.resolve(settings.read_arguments([*arguments, "--eval_batches=3"]))
    resolved.lock.close()
    # what a resumed run may change is that of the file
    assert resolved.config == dataclasses.replace(saved_config, eval_batches=3, max_steps=9)
    assert resolved.model_config == saved_model_config
    note, changes = resolved.notes
    assert changes == "this command changes eval_batches=3 (not 2), max_steps=9 (not 6)"
    assert (
        f"hidden_size=12 (not 24), learning_rate=0.01 (not 0.5), "
        f"model={saved_config.model!r} (not 'gpt-mha-rope'), although {tmp_path}/small.py differs"
    ) in note
    with pytest.raises(ValueError, match=r"was trained with learning_rate=0\.01 \(not 0\.5\)"):
        configure([*arguments, "--learning_rate=0.5"])


def test_a_time_limit_leaves_time_for_the_first_checkpoint(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "SLOW_BYTES_PER_SECOND", 1.0)
    result = call("train.py", *small_run(corpus, tmp_path / "run", max_seconds=600))
    assert result.returncode == stopping.EXIT_CODE
    assert read_state(tmp_path / "run")["step"] == 1


def test_a_run_resumes_with_its_corpus_in_another_folder(corpus, tmp_path):
    run = tmp_path / "run"
    run_train(*small_run(corpus, run, **CONSTANT_RATE, max_steps=2))
    shutil.copytree(corpus, tmp_path / "elsewhere")
    run_train(*small_run(tmp_path / "elsewhere", run, **CONSTANT_RATE, max_steps=4))
    assert completed_steps(run) == list(range(1, 5))


def test_records_of_a_run_whose_checkpoints_are_gone_are_kept(corpus, tmp_path):
    arguments = small_run(corpus, tmp_path / "run", resume="auto", max_steps=1)
    first_output = run_train(*arguments)
    assert f"starting a new run, because {tmp_path / 'run'} has no checkpoint" in first_output
    records = (tmp_path / "run" / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    run_train(*arguments)
    old_file = tmp_path / "run" / "metrics.jsonl.old"
    assert old_file.read_text() == records
    assert [record["step"] for record in read_step_records(tmp_path / "run")] == [1]


@pytest.mark.parametrize("key", ["max_seconds", "profile_steps"])
def test_what_one_call_does_is_not_inherited(branch, key):
    change_saved_state(branch, lambda state: state["run_config"].update({key: 60}))
    config, _ = configure([f"--out_dir={branch}", "--resume=auto"])
    assert not getattr(config, key)


def test_a_damaged_checkpoint_is_renamed_and_the_settings_are_those_before_it(branch):
    change_saved_state(branch, lambda state: state["run_config"].update(eval_interval=77))
    damaged = checkpoint.find(branch)
    (damaged / "model.safetensors").write_bytes(b"damaged")
    run_train(f"--out_dir={branch}", "--resume=auto")
    assert read_state(branch)["run_config"]["eval_interval"] == 3
    assert damaged.with_name(f"damaged_{damaged.name}").is_dir()


def test_a_dry_run_prints_sizes_and_writes_nothing(corpus, tmp_path):
    printed = run_train(*small_run(corpus, tmp_path / "run", max_steps=1000), "--dry_run")
    model = build("DDL-gpt-mha-rope", **SMALL)
    num_parameters = model.num_parameters()
    flops = 64_000 * cost.flops_per_token(model)
    for text in (
        f"{num_parameters:,} parameters",
        f"memory of one process: {format_bytes(16 * num_parameters)} of weights",
        # an epoch has 2005 sequences
        "1,000 steps x 4 sequences x 16 tokens = 64,000 tokens, 2.00 epochs",
        f"{flops:.3g} FLOPs\n",
        # weights and two moments in float32; two checkpoints are kept while a third is written
        f"{format_bytes(12 * num_parameters)} per checkpoint; the disk needs room for 3 of them",
    ):
        assert text in printed
    assert not list(tmp_path.iterdir())


# ---- the vocabulary size ----


def arguments_without_vocabulary(corpus: Path, out: Path) -> list[str]:
    return [word for word in small_run(corpus, out) if not word.startswith("--vocab_size=")]


@pytest.mark.parametrize(
    ("arguments", "vocab_size"),
    [
        # 257 bytes and end-of-text, rounded up to a multiple of 64
        ([], 320),
        (["--vocab_size=300"], 300),
        (["--dataset=no_such"], GPTConfig().vocab_size),
    ],
)
def test_the_vocabulary_is_that_of_the_corpus_unless_given(corpus, tmp_path, arguments, vocab_size):
    _, model_config = configure([*arguments_without_vocabulary(corpus, tmp_path), *arguments])
    assert model_config.vocab_size == vocab_size


def test_a_resumed_run_keeps_its_vocabulary(corpus, tmp_path, monkeypatch):
    """The folder is that of the default model, because none is given."""
    run = tmp_path / "runs" / "gpt-mha-rope"
    run_train(*small_run(corpus, run, max_steps=1, vocab_size=290))
    monkeypatch.chdir(tmp_path)
    _, model_config = configure([f"--dataset={corpus}", "--resume=auto"])
    assert model_config.vocab_size == 290


# ---- configs and corpora ----


RECIPE = {
    "dataset": "fineweb_edu",
    "max_steps": 100_000,
    "global_batch_size": 480,
    "learning_rate": 1e-3,
    "warmup_steps": 2000,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "optimizer": "adamw",
    "min_lr": None,
}
SIZES = {
    "small": {"num_hidden_layers": 12, "num_attention_heads": 6, "hidden_size": 768},
    "medium": {"num_hidden_layers": 24, "num_attention_heads": 8, "hidden_size": 1024},
}
EVERY_SIZE = {
    "head_dim": 128,
    "block_size": 1024,
    "vocab_size": 50304,
    "mup": True,
    "state_dtype": "float32",
}
CONFIG_FILES = sorted(set(ROOT.glob("config/*.py")) - {ROOT / "config" / "authors.py"})


def size_of_config(path: Path) -> str:
    return path.stem.rpartition("_")[2]


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_config_files_fit_the_schema(path, monkeypatch):
    world_sizes = ["1", "2", "4"] if path.stem.endswith("_cpu") else ["1", "2", "4", "8"]
    for world_size in world_sizes:
        monkeypatch.setenv("WORLD_SIZE", world_size)
        config, _ = configure([str(path)])
        assert config.out_dir == f"runs/{path.stem}"


@pytest.mark.parametrize(
    "path",
    [path for path in CONFIG_FILES if size_of_config(path) in SIZES],
    ids=lambda path: path.stem,
)
def test_config_files_of_the_papers_sizes_have_its_recipe(path):
    config, model_config = configure([str(path)])
    size = {**SIZES[size_of_config(path)], **EVERY_SIZE}
    assert size.items() <= vars(model_config).items()
    assert RECIPE.items() <= vars(config).items()


AUTHORS_FORM = {"ddl_v_sigmoid": True, "ddl_v_sigmoid_scale": 4.0, "ddl_v_bias": True}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("ddl_dv1_small", AUTHORS_FORM),
        (
            "ddl_dv4_cc_ec_small",
            {**AUTHORS_FORM, "ddl_state_conv_init": "mean", "ddl_cc_read": "pair"},
        ),
    ],
)
def test_the_form_of_the_authors_code_is_given_after_a_config_of_the_text(name, form):
    text_config, text_model = configure([f"config/{name}.py"])
    config, model_config = configure([f"config/{name}.py", "config/authors.py"])
    assert config == dataclasses.replace(text_config, out_dir=f"runs/{name}-authors")
    assert model_config == dataclasses.replace(text_model, **form)
    assert model_config != text_model


def test_the_form_of_the_authors_code_needs_a_config_of_ddl():
    with pytest.raises(ValueError, match="give this file after a config of DDL"):
        configure(["config/gpt_small.py", "config/authors.py"])


def test_a_config_file_may_be_used_with_another_model():
    arguments = ["config/ddl_dv4_small.py", "--model=gpt-mha-rope"]
    resolved = settings.resolve(settings.read_arguments(arguments))
    assert resolved.config.model == "gpt-mha-rope"
    assert not hasattr(resolved.model_config, "ddl_value_channels")
    [note] = resolved.notes
    assert note.startswith("model=gpt-mha-rope has no ")
    assert note.endswith("ddl_value_channels of config/ddl_dv4_small.py")


# ---- evaluation ----


class CountingModel(torch.nn.Module):
    """A model that counts its passes; its loss is that of a guess."""

    def __init__(self):
        super().__init__()
        self.num_passes = 0

    def forward(self, ids, targets, return_logits=False):
        self.num_passes += 1
        logits = torch.zeros(*ids.shape, 300)
        return None, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class RankAlone(World):
    """One of several ranks, whose all-reduce returns its own values."""

    def sum(self, *values):
        return list(values)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_evaluate_in_the_same_number_of_passes(rank):
    """The third rank has only one of five sequences, and makes its second pass without any."""
    model = CountingModel()
    scores = evaluate(
        model,
        ValidationBatches([np.arange(50) * 7 % 260], 4),
        [0, 3, 5, 8, 9],
        1,
        RankAlone(rank, 3, torch.device("cpu")),
        contextlib.nullcontext(),
    )
    assert scores["loss"] == pytest.approx(math.log(300))
    assert model.num_passes == 2


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_an_allocation_that_fails_ends_in_one_line(corpus, tmp_path):
    arguments = small_run(
        corpus,
        tmp_path / "run",
        block_size=512,
        hidden_size=128,
        ddl_value_channels=64,
        global_batch_size=32,
        micro_batch_size=32,
    )
    code = (
        "import faults, runpy, sys; faults.limit_memory(); sys.argv[0] = 'train.py'; "
        "runpy.run_path('train.py', run_name='__main__')"
    )
    line = one_line_error(run_script("-c", code, *arguments, env={"PYTHONPATH": "tests"}))
    assert "out of memory" in line
    assert "--micro_batch_size" in line
