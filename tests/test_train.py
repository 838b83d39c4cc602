"""train.py as a user runs it: metrics, resuming, several processes, and mistakes that end in one line."""

import contextlib
import functools
import itertools
import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, SMALL, llm_c_shard, one_line_error, script, sign, small_run
from in_process import call, finish_together

import train
from data import shards
from data.loader import TrainBatches, ValidationBatches
from data.windows import Windows
from model import build
from model.gpt import GPTConfig
from train import TrainConfig, check_run, configure, open_data
from training import checkpoint, metrics, optimizer, stopping
from training.distributed import World, can_compile
from training.validation import evaluate


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run of six steps and its output."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    return out, trained(*small_run(corpus, out)).stdout.decode()


def trained(*arguments):
    result = call("train.py", *arguments)
    assert result.returncode == 0, result.stderr.decode()
    return result


def refusal(*arguments) -> str:
    return one_line_error(call("train.py", *arguments))


def weights(run) -> dict:
    tensors = checkpoint.load_tensors(checkpoint.find(run) / "model.safetensors")
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def without_last_checkpoint(run, copy):
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000006")
    return copy


def test_metrics_hold_every_step_and_evaluation(finished):
    out, printed = finished
    records = metrics.read(out / "metrics.jsonl")
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert [r["tokens"] for r in steps] == [64 * step for step in range(1, 7)]
    assert [r["step"] for r in records if "val_loss" in r] == [3, 6]
    assert [r["val_sequences"] for r in records if "val_loss" in r] == [8, 150]  # 2 x 4, then ceil(2388 / 16)
    assert [r["lr"] for r in steps][:2] == [0.005, 0.01]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(steps))
    assert steps[0]["flops"] == 64 * build("DDL-gpt-mha-rope", **SMALL).flops_per_token()
    assert "step 6/6 | loss" in printed
    assert "bits per byte" in printed
    assert "ETA 0:00" in printed


def test_losses_equal_a_plain_loop(finished, corpus):
    """The whole step against an independent AdamW written out: gradients, clipping, decay, warmup and cosine."""
    out, _ = finished
    torch.manual_seed(0)
    model = build("DDL-gpt-mha-rope", **SMALL)
    opened = shards.open_corpus(str(corpus))
    batches = TrainBatches(opened.train, 16, 4, 0)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    losses, norms = [], []
    for step in range(6):
        ids, targets = batches.get(step, 0, 4)
        logits, _ = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        losses.append(loss.item())
        norms.append(norm.item())
        cosine = 0.0005 + 0.0095 * (1 + math.cos(math.pi * (step - 1) / 4)) / 2
        lr = [0.005, 0.01, cosine][min(step, 2)]
        with torch.no_grad():
            for name, p in model.named_parameters():
                g, (m, v) = p.grad * min(1.0, 1.0 / norm.item()), moments[name]
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.05)
                p.mul_(1 - lr * (0.1 if p.ndim >= 2 else 0.0))
                hat = m / (1 - 0.9 ** (step + 1)) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
                p.sub_(lr * hat)
    records = [r for r in metrics.read(out / "metrics.jsonl") if "loss" in r]
    assert max(norms) > 1  # so that gradients are clipped
    assert [r["loss"] for r in records] == pytest.approx(losses, abs=2e-5)
    assert [r["grad_norm"] for r in records] == pytest.approx(norms, rel=1e-3)
    for name, value in weights(out).items():
        torch.testing.assert_close(torch.tensor(value), model.state_dict()[name], rtol=1e-3, atol=2e-4)


def test_final_evaluation_covers_every_validation_token(finished, corpus):
    out, _ = finished
    model, encoding, state = checkpoint.load_model(out, "cpu")
    opened = shards.open_corpus(str(corpus))
    stream = torch.from_numpy(opened.val[0].astype("int64"))
    nats = 0.0
    with torch.no_grad():
        for first in range(0, len(stream) - 1, 16):
            window = stream[first : first + 17]
            logits, _ = model(window[None, :-1])
            nats += F.cross_entropy(logits[0], window[1:], reduction="sum").item()
    last = metrics.read(out / "metrics.jsonl")[-1]
    assert last["val_loss"] == pytest.approx(nats / 2388, rel=1e-5)
    assert last["val_bits_per_byte"] == pytest.approx(nats / 2388 / math.log(2) * 2389 / 2389, rel=1e-5)
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    assert state["step"] == 6
    assert encoding.decode(encoding.encode("ok")) == "ok"


def test_the_last_evaluation_leaves_the_loss_of_every_sequence(finished, corpus, tmp_path):
    out, _ = finished
    model, *_ = checkpoint.load_model(out, "cpu")
    stream = torch.from_numpy(shards.open_corpus(str(corpus)).val[0].astype("int64"))
    wanted = []
    with torch.no_grad():
        for first in range(0, len(stream) - 1, 16):
            window = stream[first : first + 17]
            wanted.append(F.cross_entropy(model(window[None, :-1])[0][0], window[1:]).item())
    stored = np.load(out / "losses.npz")
    assert (stored["loss"].dtype, stored["loss"].shape, stored["step"].item()) == (np.float32, (150,), 6)
    assert stored["window"].tolist() == list(range(150))
    np.testing.assert_allclose(stored["loss"], wanted, rtol=1e-5)
    last = metrics.read(out / "metrics.jsonl")[-1]["val_loss"]
    assert np.average(stored["loss"], weights=[16] * 149 + [4]) == pytest.approx(last, rel=1e-6)
    for part, windows in (("first", range(75)), ("second", range(75, 150))):
        trained(*small_run(corpus, tmp_path / part, eval_part=part))
        half = np.load(tmp_path / part / "losses.npz")
        assert half["window"].tolist() == list(windows)
        np.testing.assert_allclose(half["loss"], stored["loss"][list(windows)], rtol=1e-5)
    trained(*small_run(corpus, tmp_path / "sample", eval_full=False, max_steps=1))
    assert not (tmp_path / "sample" / "losses.npz").exists()


@pytest.mark.parametrize("keys", [{"engine": "ddp"}, {"engine": "fsdp"}])
def test_two_processes_gather_the_loss_of_every_sequence(finished, corpus, tmp_path, keys):
    finish_together(2, small_run(corpus, tmp_path / "run", **keys), tmp_path / "log")
    found, alone = (np.load(out / "losses.npz")["loss"] for out in (tmp_path / "run", finished[0]))
    np.testing.assert_allclose(found, alone, rtol=1e-3)


@pytest.mark.skipif(not can_compile(), reason="no C++ compiler")
def test_losses_of_a_compiled_run_need_no_second_graph(corpus, tmp_path, monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    trained(*small_run(corpus, tmp_path / "run", compile=True, max_steps=2, eval_full=True))
    assert len(np.load(tmp_path / "run" / "losses.npz")["loss"]) == 150
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_full_disk_leaves_no_part_of_the_losses(corpus, tmp_path, monkeypatch):
    def full(stream, **arrays):
        stream.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    out = tmp_path / "run"
    warned = trained(*small_run(corpus, out, max_steps=1, warmup_steps=0)).stderr.decode()
    assert f"warning: step 1: {out / 'losses.npz'} is not written ([Errno 28]" in warned
    assert not list(out.glob("losses*"))
    assert stopping.read_status(out)["ended"] == "finished"


def losses(out):
    return [(r["step"], r.get("loss"), r.get("val_loss")) for r in metrics.read(out / "metrics.jsonl")]


def test_resumed_run_is_the_uninterrupted_one(finished, corpus, tmp_path):
    whole, _ = finished
    out = without_last_checkpoint(whole, tmp_path / "resumed")
    (out / "checkpoints" / "step_00000009.tmp").mkdir()  # a save that a kill cut short
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # and a line
    trained(*small_run(corpus, out), "--resume")
    assert weights(out) == weights(whole)
    assert losses(out) == losses(whole)
    (out / "status.json").unlink()  # as in a run from before there was one
    assert b"nothing to train" in trained(*small_run(corpus, out, resume="auto")).stdout
    assert stopping.read_status(out)["ended"] == "finished"


def test_resume_can_branch_into_another_folder(finished, corpus, tmp_path):
    whole, _ = finished
    source = whole / "checkpoints" / "step_00000003"
    trained(*small_run(corpus, tmp_path / "branch", resume=source))
    assert weights(tmp_path / "branch") == weights(whole)
    assert "has step_00000006" in refusal(*small_run(corpus, whole, resume=source))


def test_a_prolonged_schedule_is_said_before_the_first_step(finished, corpus, tmp_path):
    whole, _ = finished  # six steps of a cosine from 0.01 to 0.0005, two of them warm-up
    printed = trained(*small_run(corpus, whole, resume="auto", max_steps=8), "--dry_run").stdout.decode()
    note = next(line for line in printed.splitlines() if line.startswith("note: "))
    # Of eight steps, 6 / 8 are over: half of a cosine's way for each step of 6 from the third on.
    rate = 5e-4 + 9.5e-3 * (1 + math.cos(math.pi * 5 / 6)) / 2
    assert f"max_steps=8 (before: 6) the learning rate goes from 0.0005 to {rate:.3g} " in note
    assert "--schedule=wsd" in note
    assert "--init_from=" in note
    keys, out = {"schedule": "wsd", "decay_steps": 1, "checkpoint_interval": 2}, tmp_path / "wsd"
    trained(*small_run(corpus, out, **keys, max_steps=4))
    shutil.rmtree(out / "checkpoints" / "step_00000004")
    printed = trained(*small_run(corpus, out, **keys, resume="auto", max_steps=9), "--dry_run").stdout
    assert b"note: " not in printed  # the fall had not begun


WSD = {"schedule": "wsd", "min_lr": 0.001}


def test_a_decay_longer_than_the_steps_after_warm_up_is_refused(corpus, tmp_path):
    out = tmp_path / "run"
    line = refusal(*small_run(corpus, out, **WSD, decay_steps=5))  # six steps, two of them warm-up
    assert "decay_steps=5, but max_steps=6 has 4 steps after warmup_steps=2: give 0 to 4, or leave it out" in line
    assert "has 0 steps after warmup_steps=9" in refusal(*small_run(corpus, out, **WSD, decay_steps=1, warmup_steps=9))
    assert "decay_steps=9, but max_steps=8 " in refusal(*small_run(corpus, out, **WSD, max_steps=8, decay_steps=9))
    assert not out.exists()
    configure(small_run(corpus, out, **WSD, decay_steps=4))
    trained(*small_run(corpus, out, **WSD, max_steps=10))
    rates = [r["lr"] for r in metrics.read(out / "metrics.jsonl") if "loss" in r]
    assert rates == pytest.approx([0.005, *[0.01] * 7, 0.0055, 0.001])


def test_a_run_begun_before_keeps_its_decay(corpus, tmp_path):
    """Also one that was longer than the run, with its cliff; a fifth is of runs that begin now."""
    out = tmp_path / "run"
    trained(*small_run(corpus, out, **WSD, max_steps=3))
    file = checkpoint.find(out) / "state.json"
    state = json.loads(file.read_text())
    assert state["run_config"]["decay_steps"] is None
    state["run_config"] |= {"decay_steps": 10_000, "max_steps": 6}
    file.write_text(json.dumps(state))
    sign(file.parent)
    more = small_run(corpus, out, **WSD, resume="auto")
    assert "decay_steps=9000, but" in refusal(*more, "--decay_steps=9000")
    trained(*more)
    last = metrics.read(out / "metrics.jsonl")[-2]
    assert (last["step"], last["lr"]) == (6, 0.001)
    rates = [r["lr"] for r in metrics.read(out / "metrics.jsonl") if "loss" in r]
    assert rates[3:] == pytest.approx([0.001 + 0.009 * left / 10_000 for left in (2, 1, 0)])
    assert checkpoint.read_state(checkpoint.find(out))["run_config"]["decay_steps"] == 10_000


def test_an_evaluation_keeps_to_its_half(corpus, tmp_path):
    """2,389 tokens are 149 windows of 16 targets and one of 4; the last is in the second half."""
    last = {}
    for part in ("all", "first", "second"):
        trained(*small_run(corpus, tmp_path / part, eval_part=part))
        last[part] = metrics.last_evaluation(tmp_path / part / "metrics.jsonl")
    assert [last[part]["val_sequences"] for part in ("all", "first", "second")] == [150, 75, 75]
    first, second = 75 * 16, 74 * 16 + 4
    mean = (first * last["first"]["val_loss"] + second * last["second"]["val_loss"]) / (first + second)
    assert last["all"]["val_loss"] == pytest.approx(mean, rel=1e-6)
    assert last["first"]["val_loss"] != pytest.approx(last["second"]["val_loss"], rel=1e-5)
    result = call("train.py", *small_run(corpus, tmp_path / "one", eval_part="first", block_size=2388))
    assert result.returncode == 2
    assert b"eval_part=first: the validation split of" in result.stderr
    assert not (tmp_path / "one").exists()


def test_muon_trains_and_resumes(corpus, tmp_path):
    keys = {"optimizer": "muon", "eval_full": False}
    trained(*small_run(corpus, tmp_path / "whole", **keys))
    part = without_last_checkpoint(tmp_path / "whole", tmp_path / "part")
    trained(*small_run(corpus, part, **keys, resume="auto"))
    assert losses(part) == losses(tmp_path / "whole")
    assert weights(part) == weights(tmp_path / "whole")
    steps = [r for r in metrics.read(part / "metrics.jsonl") if "loss" in r]
    assert not [key for r in steps for key in r if key.endswith("_lr")]  # lr is the rate of all


def test_rates_apart_train_resume_and_are_said(corpus, tmp_path):
    keys = {"optimizer": "muon", "eval_full": False, "muon_learning_rate": 2e-3, "embedding_learning_rate": 0.05}
    keys |= {"weight_decay_rate": 0.03}
    trained(*small_run(corpus, tmp_path / "whole", **keys))
    steps = [r for r in metrics.read(tmp_path / "whole" / "metrics.jsonl") if "loss" in r]
    for r in steps:
        assert r["muon_lr"] == pytest.approx(r["lr"] / 5)
        assert r["embedding_lr"] == pytest.approx(r["lr"] * 5)
    assert [r["lr"] for r in steps][:2] == [0.005, 0.01]
    part = without_last_checkpoint(tmp_path / "whole", tmp_path / "part")
    trained(*small_run(corpus, part, **keys, resume="auto"))
    assert losses(part) == losses(tmp_path / "whole")
    assert weights(part) == weights(tmp_path / "whole")
    for key in ("muon_learning_rate", "embedding_learning_rate", "weight_decay_rate"):
        other = small_run(corpus, part, **{**keys, key: 0.04}, resume="auto", max_steps=9)
        assert f"{key}=0.04, but" in refusal(*other)
        assert f"was trained with {keys[key]}" in refusal(*other)
    trained(*small_run(corpus, tmp_path / "one", optimizer="muon", eval_full=False))
    assert losses(tmp_path / "one")[0] == losses(part)[0]  # before the first update
    assert losses(tmp_path / "one")[-1] != losses(part)[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_init_std": 1e30}, "step 1: loss"),
        ({"learning_rate": 1e30, "warmup_steps": 0, "grad_clip": 0.0}, "step 2: loss"),
    ],
)
def test_stops_before_the_step_on_what_is_not_finite(corpus, tmp_path, changes, message):
    out, step = tmp_path / "diverges", int(message[5])
    result = call("train.py", *small_run(corpus, out, **{"checkpoint_interval": 1, **changes}))
    [line] = result.stderr.decode().splitlines()
    assert result.returncode == 1
    assert message in line
    assert "nan" in line
    assert str(out / "nonfinite") in line
    assert f"train.py: {stopping.read_status(out)['reason']}" == line
    assert len(checkpoint.all_of(out)) == step - 1
    assert checkpoint.read_state(checkpoint.find(out / "nonfinite"))["step"] == step - 1
    diagnosis = json.loads((out / "nonfinite" / "diagnosis.json").read_text())
    assert (diagnosis["step"], diagnosis["sequences"]) == (step, [4 * step - 4, 4 * step - 1])
    assert "nan" in (diagnosis["loss"], diagnosis["grad_norm"])
    batches = TrainBatches(shards.open_corpus(str(corpus)).train, SMALL["block_size"], 4, seed=0)
    whole = batches.tokens.read(np.array(diagnosis["starts"]), SMALL["block_size"])
    assert (batches.get(step - 1, 0, 4)[0].numpy() == whole).all()
    names = [name for group in diagnosis["groups"] for name in group["parameters"]]
    assert "transformer.wte.weight" in names
    assert sum(group["of"] for group in diagnosis["groups"]) >= len(names)


MISTAKES = [
    ({"max_stepz": 5}, "unknown key --max_stepz, did you mean max_steps?"),
    ({"max_steps": "many"}, "--max_steps=many: give a whole number"),
    ({"muon_learning_rate": -1}, "muon_learning_rate=-1.0: give 0 or more"),
    ({"learning_rate": "fast"}, "--learning_rate=fast: give a number"),
    ({"dataset": "nowhere"}, "nowhere holds no *train_*.bin"),
    ({"dataset": "fineweb_edu"}, "run `python data/fineweb_edu/prepare.py`"),
    ({"vocab_size": 256}, "has 257 tokens: give 257"),
    ({"block_size": 40_000}, "the training split has 32111 tokens"),
    ({"resume": "nowhere"}, "nowhere holds no checkpoint"),
    ({"model": "gpt-mha-rope", "ddl_beta_init": 1.0}, "--ddl_beta_init is not a key of gpt-mha-rope"),
    ({"ddl_beta_init": 3}, "ddl_beta_init=3.0: give a number from 0 to 2"),
    ({"min_lr": 1.0}, "min_lr=1.0: give a number from 0 to learning_rate"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[next(reversed(m[0])) for m in MISTAKES])
def test_mistakes_end_in_one_line_with_nothing_written(corpus, tmp_path, changes, message):
    assert message in refusal(*small_run(corpus, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_dry_run_prints_the_size_and_writes_nothing(corpus, tmp_path):
    out = tmp_path / "out"
    printed = trained(*small_run(corpus, out, max_steps=1000), "--dry_run").stdout.decode()
    model = build("DDL-gpt-mha-rope", **SMALL)
    assert f"{model.num_parameters():,} parameters" in printed
    assert "1,000 steps x 4 sequences x 16 tokens = 64,000 tokens, 2.00 epochs" in printed  # 2005 windows an epoch
    assert f"{64_000 * model.flops_per_token():.3g} FLOPs, 192 bytes of float32 state" in printed
    assert "at least 420 MiB of " in printed  # the process: so small a model adds next to nothing
    assert not out.exists()


def test_the_vocabulary_is_the_corpus_s_unless_given(corpus, tmp_path, monkeypatch):
    """257 bytes and end-of-text, in a multiple of 64; a run that goes on keeps its own."""

    def size(*more):
        given = [argument for argument in small_run(corpus, tmp_path / "run") if "vocab_size" not in argument]
        return train.configure([*given, *more])[1].vocab_size

    assert size() == 320
    assert size("--vocab_size=300") == 300
    assert size("--dataset=no_such") == GPTConfig().vocab_size
    trained(*small_run(corpus, tmp_path / "run", max_steps=1, vocab_size=290))
    assert size("--resume=auto") == 290
    # the folder that a run has unless told otherwise
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").rename(tmp_path / "runs" / "DDL-gpt-mha-rope")
    monkeypatch.chdir(tmp_path)
    given = [argument for argument in small_run(corpus, tmp_path) if "vocab_size" not in argument]
    given = [argument for argument in given if "out_dir" not in argument]
    assert train.configure([*given, "--resume=auto"])[1].vocab_size == 290
    Path("runs/DDL-gpt-mha-rope").rename("runs/gpt-mha-rope")
    assert train.configure([f"--dataset={corpus}", "--resume=auto"])[1].vocab_size == 290
    assert size("--resume=auto", "--out_dir=elsewhere") == 320


def test_a_run_folder_that_cannot_be_made_ends_in_one_line(corpus, tmp_path):
    (tmp_path / "file").touch()
    assert "Not a directory" in refusal(*small_run(corpus, tmp_path / "file" / "run"))


def test_truncated_shard_is_refused(corpus, tmp_path):
    damaged = shutil.copytree(corpus, tmp_path / "corpus")
    shard = damaged / "small_train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert "small_train_000001.bin is damaged" in refusal(*small_run(damaged, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_used_run_folder_is_refused(finished, corpus):
    out, _ = finished
    before = sorted(path.stat().st_mtime_ns for path in out.rglob("*"))
    assert "is not empty: continue it with --resume=auto" in refusal(*small_run(corpus, out))
    changed = refusal(*small_run(corpus, out, resume="auto", learning_rate=0.02, max_steps=9))
    assert "learning_rate=0.02, but" in changed
    assert "was trained with 0.01" in changed
    assert sorted(path.stat().st_mtime_ns for path in out.rglob("*")) == before


def test_another_corpus_is_refused_when_resuming(finished, tmp_path, corpus):
    out, _ = finished
    other = shutil.copytree(corpus, tmp_path / "other")
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps({**meta, "source": "elsewhere"}))
    assert "is not the corpus that" in refusal(*small_run(other, out, resume="auto", max_steps=9))


def test_keys_newer_than_a_checkpoint_count_as_their_default(finished, corpus, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "old")
    file = checkpoint.find(out) / "state.json"
    state = json.loads(file.read_text())
    del state["run_config"]["beta2"], state["model_config"]["rope_base"]
    file.write_text(json.dumps(state))
    sign(file.parent)
    assert b"nothing to train" in trained(*small_run(corpus, out, resume="auto")).stdout
    assert "beta2=0.99, but" in refusal(*small_run(corpus, out, resume="auto", beta2=0.99))


MUP = {"mup": True, "hidden_size_base": 48}  # m = 4 with SMALL


def begun(corpus, out, forget: bool, **keys) -> dict:
    """lr_scales of a run's checkpoint at step 3; `forget`: taken out of it, as of before they were saved."""
    trained(*small_run(corpus, out, max_steps=3, **MUP, **keys))
    file = checkpoint.find(out) / "state.json"
    state = json.loads(file.read_text())
    scales = state["lr_scales"]
    if forget:
        del state["lr_scales"]
        file.write_text(json.dumps(state))
        sign(file.parent)
    return scales


@pytest.mark.parametrize(
    ("keys", "name", "old", "new"),
    [
        ({"optimizer": "muon"}, "transformer.h.0.attn.c_k.weight", 4, 2),
        ({"ddl_map": "v", "init": "normal"}, "transformer.h.0.ddl_attn.k_out.weight", 4, 2),
        ({}, None, None, None),
    ],
)
def test_learning_rate_scales_of_before_are_kept_or_refused(corpus, tmp_path, keys, name, old, new):
    scales = begun(corpus, tmp_path, True, **keys)
    more = small_run(corpus, tmp_path, resume="auto", max_steps=4, **MUP, **keys)
    if name is None:
        trained(*more)
        return
    assert scales[name] == new
    line = refusal(*more)
    assert f"with the learning rate of {name} times {old}, this code would take {new} (muP" in line
    assert "finish it with the code that began it" in line
    start_ = checkpoint.find(tmp_path)
    trained(
        *small_run(corpus, tmp_path / "anew", init_from=start_, max_steps=1, optimizer=keys.get("optimizer", "adamw"))
    )


def test_learning_rate_scales_that_the_code_has_changed_are_refused(corpus, tmp_path, monkeypatch):
    scales = begun(corpus, tmp_path, False)
    assert scales["transformer.h.1.mlp.c_proj.weight"] == scales["transformer.h.0.ddl_mlp.beta.weight"] == 4
    assert not [name for name in scales if "ln_" in name or "shortconv" in name or "wte" in name]
    more = small_run(corpus, tmp_path, resume="auto", max_steps=4, **MUP)
    with monkeypatch.context() as patch:
        other = {**scales, "ln_f.weight": 0.5}
        patch.setattr(optimizer, "lr_scales", lambda *_: other)
        assert "learning rate of ln_f.weight times 1, this code would take 0.5" in refusal(*more)
    trained(*more)


CONFIGS = sorted(path for path in (ROOT / "config").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_files_fit_the_schema(path, monkeypatch):
    for world in ("1", "2", "4") if path.stem.endswith("_cpu") else ("1", "2", "4", "8"):
        monkeypatch.setenv("WORLD_SIZE", world)
        config, model_config = configure([str(path)])
        assert config.out_dir == f"runs/{path.stem}"
    if path.stem.endswith(("_small", "_medium")):
        size = (12, 6, 768) if path.stem.endswith("small") else (24, 8, 1024)
        assert (model_config.num_hidden_layers, model_config.num_attention_heads, model_config.hidden_size) == size
        assert (model_config.head_dim, model_config.block_size, model_config.vocab_size) == (128, 1024, 50304)
        assert model_config.mup
        recipe = {"dataset": "fineweb_edu", "max_steps": 100_000, "global_batch_size": 480, "learning_rate": 1e-3}
        recipe |= {"warmup_steps": 2000, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0}
        recipe |= {"optimizer": "adamw", "min_lr": None}
        assert {key: getattr(config, key) for key in recipe} == recipe


def test_another_variant_over_a_config_file(capsys):
    config, model_config = configure(["config/ddl_dv4_small.py", "--model=gpt-mha-rope"])
    assert config.model == "gpt-mha-rope"
    assert not hasattr(model_config, "ddl_value_channels")
    assert "note: ddl_value_channels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 6, "world": 4}, "global_batch_size=6 does not divide over 4 processes"),
        ({"global_batch_size": 24, "micro_batch_size": 5, "world": 2}, "try --micro_batch_size=4"),
        ({"engine": "fsdp", "optimizer": "muon"}, "Muon needs whole matrices"),
        ({"learning_rate": 0.0, "weight_decay_rate": 0.1}, "weight_decay_rate=0.1 with learning_rate=0: "),
        (
            {"optimizer": "muon", "muon_learning_rate": 0.0, "weight_decay_rate": 0.1},
            "with muon_learning_rate=0: weights at a rate of 0 do not decay",
        ),
    ],
)
def test_run_contradictions(monkeypatch, changes, message):
    monkeypatch.setenv("WORLD_SIZE", str(changes.pop("world", 1)))
    with pytest.raises(ValueError, match=message):
        check_run(TrainConfig(**changes))


IDLE = [
    ("--ddl_v_constant_value=1.5", "--ddl_v_constant=True", "ddl_v_constant=False"),
    ("--ddl_beta_hidden_size=7", "--ddl_beta_single_linear=False", "ddl_beta_single_linear=True"),
    ("--ddl_v_sigmoid_scale=2.0", "--ddl_v_sigmoid=True", "ddl_v_sigmoid=False"),
    ("--ddl_k_hidden_size=7", "--ddl_map=v", "ddl_map=k"),
    ("--hidden_size_base=64", "--mup=True", "mup=False"),
    ("--decay_steps=3", "--schedule=wsd", "schedule=cosine"),
    ("--muon_learning_rate=0.01", "--optimizer=muon", "optimizer=adamw"),
    ("--rope_base=500.0", "--rope_ratio=0.5", "rope_ratio=0.0"),
]


@pytest.mark.parametrize(("typed", "beside", "without"), IDLE)
def test_a_key_that_is_typed_without_an_effect_is_refused(typed, beside, without, tmp_path):
    """In a config file, which may serve several variants, it may stand."""
    run = ["--model=DDL-gpt-mha-rope", "--max_steps=9", "--warmup_steps=0", f"--{without}"]
    with pytest.raises(ValueError, match=f"{typed[2:]} has no effect with {without}: leave one of them out"):
        configure([*run, typed])
    key, _, value = typed[2:].partition("=")
    run_config, model_config = configure([*run[:3], typed, beside])
    assert str({**vars(run_config), **vars(model_config)}[key]) == value
    (tmp_path / "file.py").write_text(f"{key} = {value}\n")
    configure([str(tmp_path / "file.py"), *run])


def test_shards_of_llm_c_train_without_conversion(tmp_path):
    folder = tmp_path / "edu_fineweb"
    folder.mkdir()
    draw = random.Random(0)
    for name, count in (("val_000000", 300), ("train_000001", 500), ("train_000002", 77)):
        llm_c_shard(folder / f"edu_fineweb_{name}.bin", [50256, *(draw.randrange(50257) for _ in range(count - 1))])
    result = trained(*small_run(folder, tmp_path / "run", vocab_size=50304, max_steps=2, warmup_steps=0))
    assert f"leaves out {577 - (35 * 16 + 1)} of 577 tokens" in result.stdout.decode()
    assert [record["step"] for record in metrics.read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 2]


def test_a_damaged_token_ends_the_run_in_one_line(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "corpus")
    shard = tmp_path / "corpus" / "small_train_000000.bin"
    llm_c_shard(shard, [300] * 20_000)
    message = refusal(*small_run(tmp_path / "corpus", tmp_path / "run"))
    assert "small_train_000000.bin holds token id 300 at" in message


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("meta.json", {"vocab_size": 259}, "meta.json has vocab_size 259, its tokenizer 257"),
        ("tokenizer.json", {"name": "gpt2"}, "meta.json has vocab_size 257, its tokenizer 50257"),
    ],
)
def test_a_corpus_whose_tokenizer_is_another_is_refused(corpus, tmp_path, file, change, message):
    shutil.copytree(corpus, tmp_path / "corpus")
    path = tmp_path / "corpus" / file
    before = json.loads(path.read_text()) if file == "meta.json" else {}
    path.write_text(json.dumps(before | change))
    config, model_config = configure(small_run(tmp_path / "corpus", tmp_path / "run"))
    with pytest.raises(ValueError, match=message):
        open_data(config, model_config)


def test_a_batch_larger_than_the_corpus_is_refused(corpus, tmp_path):
    config, model_config = configure(small_run(corpus, tmp_path / "run", global_batch_size=2008, micro_batch_size=4))
    with pytest.raises(ValueError, match=r"global_batch_size=2008, .* has 2005 sequences of block_size=16"):
        open_data(config, model_config)


class Guesser(torch.nn.Module):
    """Predicts id + 1, sure of it; a wrong answer costs what the softmax says."""

    def forward(self, ids, targets, return_logits=False):
        logits = 5.0 * F.one_hot((ids + 1) % 300, 300)
        loss = F.cross_entropy(logits.view(-1, 300), targets.view(-1), ignore_index=-1)
        return logits if return_logits else None, loss


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_answers_are_counted_from_their_position_on(rows):
    documents = np.array([[1, 2, 3, 4, 5], [9, 9, 9, 10, 11], [1, 2, 3, 4, 9], [1, 2, 9, 4, 5], [7, 8, 9, 10, 11]])
    batches = ValidationBatches([documents.ravel()], 4, documents=Windows(5, scored=((2, 4),)))
    world = World(0, 1, torch.device("cpu"))
    scores = evaluate(Guesser(), batches, [0, 1, 2, 3, 4], rows, world, contextlib.nullcontext())
    # Of the targets from position 2 on, in each document the last two, these follow by one: 2, 2, 1, 1, 2.
    assert scores["accuracy"] == 8 / 10
    assert scores["exact_match"] == 3 / 5
    batches = ValidationBatches([documents.ravel()], 4, documents=Windows(5))
    assert "accuracy" not in evaluate(Guesser(), batches, [0, 1], rows, world, contextlib.nullcontext())


class Alone(World):
    """One of several processes whose sums are its own."""

    def sum(self, *values):
        return list(values)


@pytest.mark.parametrize("rows", [1, 2])
def test_processes_share_the_windows_and_make_as_many_passes(rows):
    tokens = np.arange(50) * 7 % 260
    batches = ValidationBatches([tokens], 4)
    windows, calls, read = [0, 3, 5, 8, 9], [], []

    class Counting(Guesser):
        def forward(self, ids, targets, return_logits=False):
            calls[-1] += 1
            read.extend(row[0].item() for row, t in zip(ids, targets) if (t != -1).any())
            return super().forward(ids, targets, return_logits)

    losses = []
    for rank in range(3):
        calls.append(0)
        world = Alone(rank, 3, torch.device("cpu"))
        losses.append(evaluate(Counting(), batches, windows, rows, world, contextlib.nullcontext())["loss"])
    assert len(set(calls)) == 1
    assert sorted(read) == sorted(tokens[4 * window] for window in windows)
    assert all(math.isfinite(loss) for loss in losses)


def test_the_copy_task_trains_and_is_scored(tmp_path):
    made = script("data/copy_task/prepare.py", f"--out={tmp_path}", "--half=4", "--sequences=300", "--val_sequences=20")
    assert made.returncode == 0, made.stderr.decode()
    trained(*small_run(tmp_path, tmp_path / "run", block_size=8, max_steps=2, warmup_steps=0))
    last = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["val_sequences"] == 20
    assert last["val_exact_match"] <= last["val_accuracy"] < 0.5
    message = refusal(*small_run(tmp_path, tmp_path / "run2", block_size=16))
    assert "block_size=16: the documents of this corpus have 9 tokens" in message


def labelled_corpus(folder, labels_of) -> Path:
    """Documents of 17 ids below 12 and as many labels, those of training window i for which labels_of(i) is true at
    some positions (bool, 17)."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for split, count in (("train", 64), ("val", 6)):
        documents = draw.integers(1, 12, (count, 34))
        for i, document in enumerate(documents):
            document[17:][~(labels_of(i) if split == "train" else np.arange(17) > 8)] = 0
        shards.write_shard(folder / f"x_{split}_000000.bin", documents.ravel())
    meta = {"tokenizer": "ids", "vocab_size": 12, "eot_token": 11, "window_tokens": 34, "labels": True}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "tokenizer.json").write_text(json.dumps({"name": "ids", "vocab_size": 12}))
    return folder


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """Windows with 17, 5, 1 and no labels."""
    last = (0, 12, 16, 17)
    return labelled_corpus(tmp_path_factory.mktemp("labels") / "corpus", lambda i: np.arange(17) >= last[i % 4])


LABELLED = {"block_size": 17, "global_batch_size": 8, "max_steps": 4, "grad_clip": 0.0, "eval_interval": 9}


def courses(run) -> list[list[float]]:
    return [
        [r[key] for r in metrics.read(run / "metrics.jsonl") if key in r] for key in ("loss", "grad_norm", "val_loss")
    ]


def test_micro_batches_and_processes_do_not_change_what_is_minimised(unequal, tmp_path):
    """Some micro-batches have one label, or none."""
    for rows in (8, 4, 1):
        trained(*small_run(unequal, tmp_path / f"{rows}", **LABELLED, micro_batch_size=rows))
    for engine in ("ddp", "fsdp"):
        arguments = small_run(unequal, tmp_path / engine, **LABELLED, micro_batch_size=2, engine=engine)
        finish_together(2, arguments, tmp_path / "log")
    whole = courses(tmp_path / "8")
    assert len(whole[0]) == 4
    assert len(set(whole[0])) == 4
    for other in ("4", "1", "ddp", "fsdp"):
        found = courses(tmp_path / other)
        assert found[1][0] == pytest.approx(whole[1][0], rel=1e-5)
        for ours, theirs, bound in zip(found, whole, (1e-4, 1e-3, 1e-4)):
            assert ours == pytest.approx(theirs, rel=bound)


def test_the_loss_of_a_step_is_the_mean_over_its_labels(unequal, tmp_path):
    trained(*small_run(unequal, tmp_path / "run", **LABELLED, micro_batch_size=1))
    torch.manual_seed(0)
    model = build("DDL-gpt-mha-rope", **{**SMALL, "block_size": 17})
    ids, targets = TrainBatches(shards.open_corpus(str(unequal)).train, 17, 8, 0, documents=Windows(34, True)).get(
        0, 0, 8
    )
    loss = F.cross_entropy(model(ids)[0].flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    losses, norms, _ = courses(tmp_path / "run")
    assert losses[0] == pytest.approx(loss.item(), rel=1e-5)
    assert norms[0] == pytest.approx(norm.item(), rel=1e-5)


def test_a_batch_without_labels_adds_nothing_and_a_corpus_without_is_refused(tmp_path):
    one = labelled_corpus(tmp_path / "one", lambda i: np.full(17, i == 5))
    trained(*small_run(one, tmp_path / "run", **{**LABELLED, "max_steps": 8}))  # an epoch
    found, norms, _ = courses(tmp_path / "run")
    assert [loss > 0 for loss in found].count(True) == 1
    assert [norm > 0 for norm in norms] == [loss > 0 for loss in found]
    none = labelled_corpus(tmp_path / "none", lambda i: np.zeros(17, dtype=bool))
    line = refusal(*small_run(none, tmp_path / "refused", **LABELLED))
    assert f"the training split of {none} has no label in the 64 documents" in line
    shards.write_shard(one / "x_val_000000.bin", np.tile(np.repeat([1, 0], 17), 6))
    line = refusal(*small_run(one, tmp_path / "refused", **LABELLED))
    assert "the validation split of " in line
    assert not (tmp_path / "refused").exists()
