"""train.py as a user runs it: metrics, resuming, several processes, mistakes that end in one
line.
"""

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
from helpers import ROOT, SMALL, encode_shard, one_line_error, small_run, write_checksums
from in_process import call, train_in_processes

from data import shards
from data.loader import TrainBatches, ValidationBatches
from data.sequences import SequenceLayout
from model import build
from model.gpt import GPTConfig
from training import checkpoint, metrics, optimizer, stopping
from training.distributed import World
from training.settings import configure
from training.validation import evaluate
from utils.machine import can_compile


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


def steps_of(run) -> list[dict]:
    return [record for record in metrics.read(run / "metrics.jsonl") if "loss" in record]


def losses(run):
    records = metrics.read(run / "metrics.jsonl")
    return [(r["step"], r.get("loss"), r.get("val_loss")) for r in records]


def without_last_checkpoint(run, copy):
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000006")
    return copy


def changed_state(run, change) -> None:
    """Write state.json of the newest checkpoint anew, as `change` leaves it."""
    folder = checkpoint.find(run)
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    write_checksums(folder)


# ---- what a run computes and says ----


def test_metrics_hold_every_step_and_evaluation(finished):
    out, printed = finished
    records, steps = metrics.read(out / "metrics.jsonl"), steps_of(out)
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert [r["tokens"] for r in steps] == [64 * step for step in range(1, 7)]
    evaluated = [(r["step"], r["val_sequences"]) for r in records if "val_loss" in r]
    assert evaluated == [(3, 8), (6, 150)]  # 2 x 4, then ceil(2388 / 16)
    assert [r["lr"] for r in steps][:2] == [0.005, 0.01]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(steps))
    assert steps[0]["flops"] == 64 * build("DDL-gpt-mha-rope", **SMALL).flops_per_token()
    for text in ("step 6/6 | loss", "bits per byte", "remaining 0:00"):
        assert text in printed


def test_losses_equal_a_plain_loop(finished, corpus):
    """The whole step against an AdamW written out: gradients, clipping, decay, warmup and
    cosine.
    """
    out, _ = finished
    torch.manual_seed(0)
    model = build("DDL-gpt-mha-rope", **SMALL)
    batches = TrainBatches(shards.open_corpus(str(corpus)).train, 16, 4, 0)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    moments = {name: (zero, zero.clone()) for name, zero in zeros.items()}
    found = []
    for step in range(6):
        ids, targets = batches.get(step, 0, 4)
        loss = F.cross_entropy(model(ids)[0].flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
        found.append((loss.item(), norm))
        cosine = 0.0005 + 0.0095 * (1 + math.cos(math.pi * (step - 1) / 4)) / 2
        lr = [0.005, 0.01, cosine][min(step, 2)]
        with torch.no_grad():
            for name, p in model.named_parameters():
                g, (m, v) = p.grad * min(1.0, 1.0 / norm), moments[name]
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.05)
                p.mul_(1 - lr * (0.1 if p.ndim >= 2 else 0.0))
                corrected = (v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
                p.sub_(lr * m / (1 - 0.9 ** (step + 1)) / corrected)
    assert max(norm for _, norm in found) > 1  # so that gradients are clipped
    for record, (loss, norm) in zip(steps_of(out), found, strict=True):
        assert record["loss"] == pytest.approx(loss, abs=2e-5)
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-3)
    for name, value in weights(out).items():
        wanted = model.state_dict()[name]
        torch.testing.assert_close(torch.tensor(value), wanted, rtol=1e-3, atol=2e-4)


@torch.no_grad()
def test_the_last_evaluation_covers_every_token_and_leaves_the_loss_of_every_window(
    finished, corpus, tmp_path
):
    out, _ = finished
    model, _, state = checkpoint.load_model(out, "cpu")
    tokens = torch.from_numpy(shards.open_corpus(str(corpus)).val[0].astype("int64"))
    wanted = []
    for first in range(0, len(tokens) - 1, 16):
        window = tokens[first : first + 17]
        wanted.append(F.cross_entropy(model(window[None, :-1])[0][0], window[1:]).item())
    mean = np.average(wanted, weights=[16] * 149 + [4])
    last = metrics.read(out / "metrics.jsonl")[-1]
    assert last["val_loss"] == pytest.approx(mean, rel=1e-5)
    assert last["val_bits_per_byte"] == pytest.approx(mean / math.log(2), rel=1e-5)
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    assert state["step"] == 6
    stored = np.load(out / "losses.npz")
    assert (stored["loss"].dtype, stored["step"].item()) == (np.float32, 6)
    assert stored["window"].tolist() == list(range(150))
    np.testing.assert_allclose(stored["loss"], wanted, rtol=1e-5)
    # Each half of the windows alone; 149 of them have 16 targets, the last one 4.
    for part, windows, weight in (
        ("first", range(75), [16] * 75),
        ("second", range(75, 150), [16] * 74 + [4]),
    ):
        with torch.enable_grad():
            trained(*small_run(corpus, tmp_path / part, eval_part=part))
        half = np.load(tmp_path / part / "losses.npz")
        assert half["window"].tolist() == list(windows)
        np.testing.assert_allclose(half["loss"], stored["loss"][list(windows)], rtol=1e-5)
        last = metrics.find_last_evaluation(tmp_path / part / "metrics.jsonl")
        assert last["val_loss"] == pytest.approx(np.average(half["loss"], weights=weight), rel=1e-6)
    line = refusal(*small_run(corpus, tmp_path / "one", eval_part="first", block_size=2388))
    assert "eval_part=first: the validation split of" in line


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_gather_the_loss_of_every_window(finished, corpus, tmp_path, engine):
    train_in_processes(2, small_run(corpus, tmp_path / "run", engine=engine), tmp_path / "log")
    found, alone = (np.load(run / "losses.npz")["loss"] for run in (tmp_path / "run", finished[0]))
    np.testing.assert_allclose(found, alone, rtol=1e-3)


@pytest.mark.skipif(not can_compile(), reason="no C++ compiler")
def test_losses_of_a_compiled_run_need_no_second_graph(corpus, tmp_path, monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", eager)
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
    assert f"warning: could not write {out / 'losses.npz'} after step 1 (No space" in warned
    assert not list(out.glob("losses*"))
    assert stopping.read_status(out).ended == "finished"


# ---- going on ----


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
    assert stopping.read_status(out).ended == "finished"
    source = whole / "checkpoints" / "step_00000003"
    trained(*small_run(corpus, tmp_path / "branch", resume=source))
    assert weights(tmp_path / "branch") == weights(whole)
    assert "has another latest checkpoint, step_00000006" in refusal(
        *small_run(corpus, whole, resume=source)
    )


RATES = {"muon_learning_rate": 2e-3, "embedding_learning_rate": 0.05, "weight_decay_rate": 0.03}


@pytest.mark.parametrize("own", [{}, RATES], ids=["one rate", "rates apart"])
def test_muon_trains_and_resumes(corpus, tmp_path, own):
    keys = {"optimizer": "muon", "eval_full": False, **own}
    trained(*small_run(corpus, tmp_path / "whole", **keys))
    part = without_last_checkpoint(tmp_path / "whole", tmp_path / "part")
    trained(*small_run(corpus, part, **keys, resume="auto"))
    assert losses(part) == losses(tmp_path / "whole")
    assert weights(part) == weights(tmp_path / "whole")
    for record in steps_of(part):
        rates = {key: record[key] / record["lr"] for key in record if key.endswith("_lr")}
        wanted = {"muon_lr": pytest.approx(0.2), "embedding_lr": pytest.approx(5)} if own else {}
        assert rates == wanted
    for key in own:
        line = refusal(*small_run(corpus, part, **{**keys, key: 0.04}, resume="auto", max_steps=9))
        assert f"{key}={keys[key]} (not 0.04" in line


WSD = {"schedule": "wsd", "min_lr": 0.001}


def test_a_prolonged_schedule_is_said_before_the_first_step(finished, corpus, tmp_path):
    whole, _ = finished  # six steps of a cosine from 0.01 to 0.0005, two of them warm-up
    words = small_run(corpus, whole, resume="auto", max_steps=8)
    printed = trained(*words, "--dry_run").stdout.decode()
    [note] = [line for line in printed.splitlines() if "learning rate jumps" in line]
    # Of eight steps, 6 / 8 are over: half of a cosine's way for each step of 6 from the third on.
    rate = 5e-4 + 9.5e-3 * (1 + math.cos(math.pi * 5 / 6)) / 2
    assert f"max_steps=8 (was 6) the learning rate jumps from 0.0005 to {rate:.3g} " in note
    assert "--schedule=wsd" in note
    keys, out = {"schedule": "wsd", "decay_steps": 1, "checkpoint_interval": 2}, tmp_path / "wsd"
    trained(*small_run(corpus, out, **keys, max_steps=4))
    shutil.rmtree(out / "checkpoints" / "step_00000004")
    more = small_run(corpus, out, **keys, resume="auto", max_steps=9)
    assert (
        b"learning rate jumps" not in trained(*more, "--dry_run").stdout
    )  # the fall had not begun


def test_the_fall_of_wsd_fits_the_run_or_is_refused(corpus, tmp_path):
    out = tmp_path / "run"
    line = refusal(*small_run(corpus, out, **WSD, decay_steps=5))  # six steps, two of warm-up
    wanted = "decay_steps=5, but max_steps=6 has 4 steps after warmup_steps=2: give 0 to 4, or omit"
    assert wanted in line
    line = refusal(*small_run(corpus, out, **WSD, decay_steps=1, warmup_steps=9))
    assert "has 0 steps after warmup_steps=9" in line
    assert not out.exists()
    configure(small_run(corpus, out, **WSD, decay_steps=4))
    trained(*small_run(corpus, out, **WSD, max_steps=10))
    rates = [record["lr"] for record in steps_of(out)]
    assert rates == pytest.approx([0.005, *[0.01] * 7, 0.0055, 0.001])


def test_a_run_begun_with_a_longer_fall_keeps_it(corpus, tmp_path):
    out = tmp_path / "run"
    trained(*small_run(corpus, out, **WSD, max_steps=3))
    begun = {"decay_steps": 10_000, "max_steps": 6}
    changed_state(out, lambda state: state["run_config"].update(begun))
    more = small_run(corpus, out, **WSD, resume="auto")
    assert "decay_steps=9000, but max_steps=6 has" in refusal(*more, "--decay_steps=9000")
    trained(*more)
    rates = [record["lr"] for record in steps_of(out)][3:]
    assert rates == pytest.approx([0.001 + 0.009 * left / 10_000 for left in (2, 1, 0)])
    state = checkpoint.read_state(checkpoint.find(out))
    assert state["run_config"]["decay_steps"] == 10_000


MUP = {"mup": True, "hidden_size_base": 48, "max_steps": 3}  # m = 4 with SMALL
K_OUT = "transformer.h.0.ddl_attn.k_out.weight"


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"optimizer": "muon"}, "transformer.h.0.attn.c_k.weight"),
        ({"ddl_map": "v", "init": "normal"}, K_OUT),
        ({}, None),
    ],
)
def test_learning_rate_scales_are_those_it_began_with(corpus, tmp_path, monkeypatch, keys, name):
    """Older checkpoints do not name them: every scaled matrix had the same."""
    out = tmp_path / "run"
    trained(*small_run(corpus, out, **MUP, **keys))
    scales = checkpoint.read_state(checkpoint.find(out))["lr_scales"]
    more = small_run(corpus, out, resume="auto", **{**MUP, "max_steps": 4}, **keys)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "get_lr_scales", lambda *_: {**scales, "ln_f.weight": 0.5})
        line = refusal(*more)
    assert "learning rate of ln_f.weight times 1, this code would use 0.5" in line
    changed_state(out, lambda state: state.pop("lr_scales"))
    if name is None:
        trained(*more)
        return
    assert scales[name] == 2
    line = refusal(*more)
    assert f"with the learning rate of {name} times 4, this code would use 2 (muP" in line
    assert "finish the run with the code that started it" in line
    kind = keys.get("optimizer", "adamw")
    words = {"init_from": checkpoint.find(out), "max_steps": 1, "optimizer": kind}
    trained(*small_run(corpus, tmp_path / "anew", **words))


def test_keys_newer_than_a_checkpoint_count_as_their_default(finished, corpus, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "old")

    def forget(state):
        del state["run_config"]["beta2"], state["model_config"]["rope_base"]

    changed_state(out, forget)
    assert b"nothing to train" in trained(*small_run(corpus, out, resume="auto")).stdout
    assert "beta2=0.95 (not 0.99" in refusal(*small_run(corpus, out, resume="auto", beta2=0.99))


def test_a_resumed_run_takes_what_is_not_given_from_the_run(finished, tmp_path):
    run_folder, _ = finished
    branch = shutil.copytree(run_folder, tmp_path / "branch")
    trained(f"--out_dir={branch}", "--resume=auto", "--max_steps=7")
    state = checkpoint.read_state(checkpoint.find(branch))
    first = checkpoint.read_state(checkpoint.find(run_folder))
    assert state["model"] == first["model"]
    assert state["model_config"] == first["model_config"]
    changed = {"max_steps": 7, "out_dir": str(branch), "resume": "auto"}
    assert state["run_config"] == {**first["run_config"], **changed}


def test_all_settings_that_differ_from_the_resumed_run_are_in_one_message(finished, corpus):
    run_folder, _ = finished
    changes = {"learning_rate": 0.02, "seed": 7, "hidden_size": 24, "eval_batches": 1}
    line = refusal(*small_run(corpus, run_folder, resume="auto", max_steps=9, **changes))
    assert "hidden_size=12 (not 24), learning_rate=0.01 (not 0.02), seed=0 (not 7)" in line
    assert "eval_batches" not in line  # evaluation may change


def test_a_resumed_run_may_evaluate_otherwise(finished, tmp_path):
    run_folder, _ = finished
    branch = shutil.copytree(run_folder, tmp_path / "branch")
    changes = ("--eval_batches=1", "--eval_part=second", "--eval_full=False", "--log_interval=1")
    trained(f"--out_dir={branch}", "--resume=auto", "--max_steps=7", *changes)
    assert checkpoint.read_state(checkpoint.find(branch))["run_config"]["eval_batches"] == 1


def test_the_best_loss_is_forgotten_if_other_sequences_are_evaluated(finished, tmp_path):
    run_folder, _ = finished
    branch = shutil.copytree(run_folder, tmp_path / "branch")
    changed_state(branch, lambda state: state.update(best_val_loss=0.5))
    trained(f"--out_dir={branch}", "--resume=auto", "--max_steps=7", "--eval_part=second")
    last = metrics.find_last_evaluation(branch / "metrics.jsonl")
    assert last["best_val_loss"] == last["val_loss"]


def test_a_time_limit_is_not_inherited(finished, tmp_path):
    run_folder, _ = finished
    branch = shutil.copytree(run_folder, tmp_path / "branch")
    changed_state(branch, lambda state: state["run_config"].update(max_seconds=60.0))
    config, _ = configure([f"--out_dir={branch}", "--resume=auto"])
    assert config.max_seconds is None


def test_a_checkpoint_outside_of_a_run_needs_an_out_dir(finished, tmp_path):
    run_folder, _ = finished
    copy = shutil.copytree(checkpoint.find(run_folder), tmp_path / "step_00000006")
    line = refusal(f"--resume={copy}")
    assert f"resume={copy} is not one of a run's checkpoints; give the run folder" in line


def test_settings_come_from_the_checkpoint_that_is_resumed_if_the_latest_is_damaged(
    finished, tmp_path
):
    run_folder, _ = finished
    branch = shutil.copytree(run_folder, tmp_path / "branch")
    changed_state(branch, lambda state: state["run_config"].update(eval_interval=77))
    (checkpoint.find(branch) / "model.safetensors").write_bytes(b"damaged")
    trained(f"--out_dir={branch}", "--resume=auto")
    assert checkpoint.read_state(checkpoint.find(branch))["run_config"]["eval_interval"] == 3


def test_a_run_of_a_later_version_says_so(finished, tmp_path):
    run_folder, _ = finished
    branch = shutil.copytree(run_folder, tmp_path / "branch")
    changed_state(branch, lambda state: state["run_config"].update(new_key=3))
    line = refusal(f"--out_dir={branch}", "--resume=auto", "--max_steps=9")
    assert "was trained by another version of this code" in line
    assert "new_key=3" in line


def test_a_dry_run_of_a_complete_run_says_that_nothing_is_left_to_train(finished):
    run_folder, _ = finished
    printed = trained(f"--out_dir={run_folder}", "--resume=auto", "--dry_run").stdout.decode()
    assert "nothing to train" in printed


def test_resume_of_a_checkpoint_names_the_folder_of_its_run(finished):
    run_folder, _ = finished
    path = run_folder / "checkpoints" / "step_00000006"
    config, _ = configure([f"--resume={path}"])
    assert Path(config.out_dir) == run_folder


def test_a_former_name_of_a_key_is_read_from_the_command_line_and_from_saved_runs(
    finished, corpus, tmp_path
):
    config, _ = configure(small_run(corpus, tmp_path / "new", state_interval=4))
    assert config.state_checkpoint_interval == 4
    run_folder, _ = finished
    branch = shutil.copytree(run_folder, tmp_path / "branch")

    def rename(state: dict) -> None:
        del state["run_config"]["state_checkpoint_interval"]
        state["run_config"]["state_interval"] = 3

    changed_state(branch, rename)
    config, _ = configure([f"--out_dir={branch}", "--resume=auto"])
    assert config.state_checkpoint_interval == 3


def test_used_run_folders_and_other_corpora_are_refused(finished, corpus, tmp_path):
    out, _ = finished
    before = sorted(path.stat().st_mtime_ns for path in out.rglob("*"))
    assert "is not empty; resume that run with --resume=auto" in refusal(*small_run(corpus, out))
    line = refusal(*small_run(corpus, out, resume="auto", learning_rate=0.02, max_steps=9))
    assert "was trained with learning_rate=0.01 (not 0.02); to resume it, omit" in line
    other = shutil.copytree(corpus, tmp_path / "other")
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps({**meta, "source": "elsewhere"}))
    line = refusal(*small_run(other, out, resume="auto", max_steps=9))
    assert "is not the corpus that" in line
    assert sorted(path.stat().st_mtime_ns for path in out.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"embedding_init_std": 1e30}, 1),
        ({"learning_rate": 1e30, "warmup_steps": 0, "grad_clip": 0.0}, 2),
    ],
)
def test_stops_before_the_step_on_what_is_not_finite(corpus, tmp_path, changes, step):
    out = tmp_path / "diverges"
    result = call("train.py", *small_run(corpus, out, **{"checkpoint_interval": 1, **changes}))
    [line] = result.stderr.decode().splitlines()
    assert result.returncode == 1
    for text in (f"step {step}: loss", "nan", str(out / "nonfinite")):
        assert text in line
    assert f"train.py: {stopping.read_status(out).reason}" == line
    assert len(checkpoint.list_checkpoints(out)) == step - 1
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


# ---- what is refused before anything is written ----


MISTAKES = [
    ({"max_stepz": 5}, "unknown key --max_stepz, did you mean max_steps, "),
    ({"max_steps": "many"}, "--max_steps=many: give a whole number"),
    ({"muon_learning_rate": -1}, "muon_learning_rate=-1.0: give 0 or more"),
    ({"learning_rate": "fast"}, "--learning_rate=fast: give a number"),
    ({"dataset": "nowhere"}, "nowhere does not hold *train_*.bin"),
    ({"dataset": "fineweb_edu"}, "run `python data/fineweb_edu/prepare.py`"),
    ({"vocab_size": 256}, "has 257 tokens: give 257"),
    ({"block_size": 40_000}, "the training split has 32111 tokens"),
    ({"resume": "nowhere"}, "nowhere does not exist"),
    ({"model": "gpt-mha-rope", "ddl_beta_init": 1.0}, "--ddl_beta_init is not a key of gpt-mha"),
    ({"ddl_beta_init": 3}, "ddl_beta_init=3.0: give a number from 0 to 2"),
    ({"min_lr": 1.0}, "min_lr=1.0: give a number from 0 to learning_rate"),
    (
        {"global_batch_size": 2008, "micro_batch_size": 4},
        "global_batch_size=2008, but the training split of CORPUS has 2005 sequences of "
        "block_size=16",
    ),
    ({"out_dir": "CORPUS/meta.json/run"}, "this is a file, but a folder is needed"),
    ({"engine": "ddp", "shard_size": 1}, "shard_size=1 has no effect with engine=ddp"),
    (
        {"weight_decay_rate": 0.1, "learning_rate": 0.0},
        "weight_decay_rate=0.1 with learning_rate=0: ",
    ),
    (
        {"optimizer": "muon", "muon_learning_rate": 0.0, "weight_decay_rate": 0.1},
        "with muon_learning_rate=0: parameters with a learning rate of 0 do not decay",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_mistakes_end_in_one_line_with_nothing_written(corpus, tmp_path, changes, message):
    named = {key: str(value).replace("CORPUS", str(corpus)) for key, value in changes.items()}
    line = refusal(*small_run(corpus, tmp_path / "out", **named))
    assert message.replace("CORPUS", str(corpus)) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        (
            4,
            {"global_batch_size": 6},
            r"global_batch_size=6 is not divisible by the number of processes \(4\)",
        ),
        (
            64,
            {"global_batch_size": 480, "max_steps": 100_000},
            r"\(64\); try --global_batch_size=448 \(-6.7% tokens per step; the same tokens in 107,143 "
            r"steps, --max_steps=107143\) or --global_batch_size=512 \(\+6.7% tokens per step; the "
            r"same tokens in 93,750 steps, --max_steps=93750\)",
        ),
        (8, {"global_batch_size": 6}, r"\(8\); try --global_batch_size=8 \(\+33.3% tokens"),
        (2, {"global_batch_size": 24, "micro_batch_size": 5}, "try --micro_batch_size=4"),
    ],
)
def test_batches_that_do_not_divide(corpus, tmp_path, monkeypatch, world, changes, message):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(ValueError, match=message):
        configure(small_run(corpus, tmp_path, **changes))


DAMAGED = [
    ("small_train_000001.bin", lambda old: old[:-2], "small_train_000001.bin is damaged"),
    (
        "meta.json",
        lambda old: old.replace(b"257", b"259"),
        "vocab_size is 259 in meta.json, but its tokenizer has 257 tokens",
    ),
    (
        "tokenizer.json",
        lambda old: b'{"name": "gpt2"}',
        "vocab_size is 257 in meta.json, but its tokenizer has 50257 tokens",
    ),
]


@pytest.mark.parametrize(("file", "change", "message"), DAMAGED)
def test_damaged_corpora_are_refused(corpus, tmp_path, file, change, message):
    damaged = shutil.copytree(corpus, tmp_path / "corpus")
    (damaged / file).write_bytes(change((damaged / file).read_bytes()))
    assert message in refusal(*small_run(damaged, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_damaged_token_ends_the_run_in_one_line(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "corpus")
    (tmp_path / "corpus" / "small_train_000000.bin").write_bytes(encode_shard([300] * 20_000))
    message = refusal(*small_run(tmp_path / "corpus", tmp_path / "run"))
    assert "small_train_000000.bin holds token id 300 at" in message


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
    with pytest.raises(ValueError, match=f"{typed[2:]} has no effect with {without}: omit one of"):
        configure([*run, typed])
    key, _, value = typed[2:].partition("=")
    run_config, model_config = configure([*run[:3], typed, beside])
    assert str({**vars(run_config), **vars(model_config)}[key]) == value
    (tmp_path / "file.py").write_text(f"{key} = {value}\n")
    configure([str(tmp_path / "file.py"), *run])


def test_dry_run_prints_the_size_and_writes_nothing(corpus, tmp_path):
    out = tmp_path / "out"
    printed = trained(*small_run(corpus, out, max_steps=1000), "--dry_run").stdout.decode()
    model = build("DDL-gpt-mha-rope", **SMALL)
    for text in (
        f"{model.num_parameters():,} parameters",
        "1,000 steps x 4 sequences x 16 tokens = 64,000 tokens, 2.00 epochs",  # of 2005 windows
        f"{64_000 * model.flops_per_token():.3g} FLOPs, 192 bytes of float32 state",
        "a step cannot do without 420 MiB",  # the process: so small a model adds next to nothing
    ):
        assert text in printed
    assert not out.exists()


def test_the_vocabulary_is_the_corpus_s_unless_given(corpus, tmp_path, monkeypatch):
    """257 bytes and end-of-text, in a multiple of 64; a run that goes on keeps its own."""
    words = [w for w in small_run(corpus, tmp_path / "run") if "vocab_size" not in w]

    def size(*more):
        return configure([*words, *more])[1].vocab_size

    assert size() == 320
    assert size("--vocab_size=300") == 300
    assert size("--dataset=no_such") == GPTConfig().vocab_size
    trained(*small_run(corpus, tmp_path / "run", max_steps=1, vocab_size=290))
    assert size("--resume=auto") == 290
    assert size("--resume=auto", "--out_dir=elsewhere") == 320
    # The folder that a run has unless told otherwise.
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").rename(tmp_path / "runs" / "DDL-gpt-mha-rope")
    monkeypatch.chdir(tmp_path)
    words = [word for word in words if "out_dir" not in word]
    assert size("--resume=auto") == 290
    Path("runs/DDL-gpt-mha-rope").rename("runs/gpt-mha-rope")
    assert configure([f"--dataset={corpus}", "--resume=auto"])[1].vocab_size == 290


# ---- configs and corpora ----


RECIPE = {"dataset": "fineweb_edu", "max_steps": 100_000, "global_batch_size": 480}
RECIPE |= {"learning_rate": 1e-3, "warmup_steps": 2000, "weight_decay": 0.1, "beta1": 0.9}
RECIPE |= {"beta2": 0.95, "grad_clip": 1.0, "optimizer": "adamw", "min_lr": None}
SIZES = {
    "small": {"num_hidden_layers": 12, "num_attention_heads": 6, "hidden_size": 768},
    "medium": {"num_hidden_layers": 24, "num_attention_heads": 8, "hidden_size": 1024},
}
SHARED = {"head_dim": 128, "block_size": 1024, "vocab_size": 50304, "mup": True}


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/*.py")), ids=lambda path: path.stem)
def test_config_files_fit_the_schema(path, monkeypatch):
    for world in ("1", "2", "4") if path.stem.endswith("_cpu") else ("1", "2", "4", "8"):
        monkeypatch.setenv("WORLD_SIZE", world)
        config, model_config = configure([str(path)])
        assert config.out_dir == f"runs/{path.stem}"
    if size := SIZES.get(path.stem.rpartition("_")[2]):
        assert {**size, **SHARED}.items() <= vars(model_config).items()
        assert RECIPE.items() <= vars(config).items()


def test_another_variant_over_a_config_file(capsys):
    config, model_config = configure(["config/ddl_dv4_small.py", "--model=gpt-mha-rope"])
    assert config.model == "gpt-mha-rope"
    assert not hasattr(model_config, "ddl_value_channels")
    assert "note: ddl_value_channels" in capsys.readouterr().out


def test_shards_of_llm_c_train_without_conversion(tmp_path):
    folder, draw = tmp_path / "edu_fineweb", random.Random(0)
    folder.mkdir()
    for name, count in (("val_000000", 300), ("train_000001", 500), ("train_000002", 77)):
        tokens = [50256, *(draw.randrange(50257) for _ in range(count - 1))]
        (folder / f"edu_fineweb_{name}.bin").write_bytes(encode_shard(tokens))
    keys = {"vocab_size": 50304, "max_steps": 2, "warmup_steps": 0}
    printed = trained(*small_run(folder, tmp_path / "run", **keys)).stdout.decode()
    assert f"({577 - (35 * 16 + 1)} of 577 tokens dropped" in printed
    assert [r["step"] for r in metrics.read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 2]


class Guesser(torch.nn.Module):
    """Predicts id + 1, sure of it; a wrong answer costs what the softmax says."""

    def __init__(self):
        super().__init__()
        self.read = []

    def forward(self, ids, targets, return_logits=False):
        self.read.append([row[0].item() for row, t in zip(ids, targets) if (t != -1).any()])
        logits = 5.0 * F.one_hot((ids + 1) % 300, 300)
        loss = F.cross_entropy(logits.view(-1, 300), targets.view(-1), ignore_index=-1)
        return logits if return_logits else None, loss


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_answers_are_counted_from_their_position_on(rows):
    documents = [[1, 2, 3, 4, 5], [9, 9, 9, 10, 11], [1, 2, 3, 4, 9], [1, 2, 9, 4, 5]]
    documents = np.array([*documents, [7, 8, 9, 10, 11]]).ravel()
    world, nothing = World(0, 1, torch.device("cpu")), contextlib.nullcontext()
    batches = ValidationBatches([documents], 4, layout=SequenceLayout(5, scored=((2, 4),)))
    scores = evaluate(Guesser(), batches, [0, 1, 2, 3, 4], rows, world, nothing)
    # Of the last two targets of each document these follow by one: 2, 2, 1, 1, 2.
    assert scores["accuracy"] == 8 / 10
    assert scores["exact_match"] == 3 / 5
    batches = ValidationBatches([documents], 4, layout=SequenceLayout(5))
    assert "accuracy" not in evaluate(Guesser(), batches, [0, 1], rows, world, nothing)


class Alone(World):
    """One of several processes whose sums are its own."""

    def sum(self, *values):
        return list(values)


@pytest.mark.parametrize("rows", [1, 2])
def test_processes_share_the_windows_and_make_as_many_passes(rows):
    tokens = np.arange(50) * 7 % 260
    batches, windows, guessers = ValidationBatches([tokens], 4), [0, 3, 5, 8, 9], []
    for rank in range(3):
        guessers.append(Guesser())
        world = Alone(rank, 3, torch.device("cpu"))
        scores = evaluate(guessers[-1], batches, windows, rows, world, contextlib.nullcontext())
        assert math.isfinite(scores["loss"])
    assert len({len(guesser.read) for guesser in guessers}) == 1
    read = [first for guesser in guessers for rows in guesser.read for first in rows]
    assert sorted(read) == sorted(tokens[4 * window] for window in windows)


def test_the_copy_task_trains_and_is_scored(tmp_path):
    words = ("--half=4", "--sequences=300", "--val_sequences=20", f"--out={tmp_path}")
    assert call("data/copy_task/prepare.py", *words).returncode == 0
    trained(*small_run(tmp_path, tmp_path / "run", block_size=8, max_steps=2, warmup_steps=0))
    last = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["val_sequences"] == 20
    assert last["val_exact_match"] <= last["val_accuracy"] < 0.5
    message = refusal(*small_run(tmp_path, tmp_path / "run2", block_size=16))
    assert "block_size=16, but the documents of this corpus have 9 tokens" in message


def labelled_corpus(folder, labels_of) -> Path:
    """Documents of 17 ids below 12 and as many labels: those of training window i at the positions
    where labels_of(i), bool (17,), is true."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for split, count in (("train", 64), ("val", 6)):
        documents = draw.integers(1, 12, (count, 34))
        for i, document in enumerate(documents):
            document[17:][~(labels_of(i) if split == "train" else np.arange(17) > 8)] = 0
        shards.write_shard(folder / f"x_{split}_000000.bin", documents.ravel())
    meta = {"tokenizer": "ids", "vocab_size": 12, "eot_token": 11}
    (folder / "meta.json").write_text(json.dumps({**meta, "window_tokens": 34, "labels": True}))
    (folder / "tokenizer.json").write_text(json.dumps({"name": "ids", "vocab_size": 12}))
    return folder


LABELLED = {"block_size": 17, "global_batch_size": 8, "max_steps": 4, "grad_clip": 0.0}
LABELLED |= {"eval_interval": 9}


def courses(run) -> list[list[float]]:
    records = metrics.read(run / "metrics.jsonl")
    return [[r[key] for r in records if key in r] for key in ("loss", "grad_norm", "val_loss")]


def test_micro_batches_and_processes_do_not_change_what_is_minimised(tmp_path):
    """Windows have 17, 5, 1 and no labels, some micro-batches one or none: the loss of a step is
    the mean over its labels."""
    last = (0, 12, 16, 17)
    corpus = labelled_corpus(tmp_path / "corpus", lambda i: np.arange(17) >= last[i % 4])
    for rows in (8, 1):
        trained(*small_run(corpus, tmp_path / f"{rows}", **LABELLED, micro_batch_size=rows))
    for engine in ("ddp", "fsdp"):
        keys = {**LABELLED, "micro_batch_size": 2, "engine": engine}
        train_in_processes(2, small_run(corpus, tmp_path / engine, **keys), tmp_path / "log")
    whole = courses(tmp_path / "8")
    assert len(set(whole[0])) == len(whole[0]) == 4
    for other in ("1", "ddp", "fsdp"):
        found = courses(tmp_path / other)
        assert found[1][0] == pytest.approx(whole[1][0], rel=1e-5)
        for ours, theirs, bound in zip(found, whole, (1e-4, 1e-3, 1e-4)):
            assert ours == pytest.approx(theirs, rel=bound)
    torch.manual_seed(0)
    model = build("DDL-gpt-mha-rope", **{**SMALL, "block_size": 17})
    layout = SequenceLayout(34, True)
    batches = TrainBatches(shards.open_corpus(str(corpus)).train, 17, 8, 0, layout=layout)
    ids, targets = batches.get(0, 0, 8)
    loss = F.cross_entropy(model(ids)[0].flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert whole[0][0] == pytest.approx(loss.item(), rel=1e-5)
    assert whole[1][0] == pytest.approx(norm.item(), rel=1e-5)


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
