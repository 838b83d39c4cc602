"""Runs that are killed, stopped, starved or spread over other processes end where an undisturbed run ends."""

import collections
import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL, one_line_error, script, sign, small_run
from torch.nn.parallel import DistributedDataParallel

from model import build
from training import checkpoint, distributed, metrics, stopping
from training.checkpoint import load_tensors
from training.distributed import World

TIMINGS = ("seconds", "tokens_per_second", "memory")


def start(arguments, processes=1, launcher=(), log=subprocess.DEVNULL, **env):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        *launcher,
    ]
    command = command if processes > 1 or launcher else [sys.executable]
    return subprocess.Popen(
        [*command, "train.py", *arguments],
        cwd=ROOT,
        stdout=log,
        stderr=log,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def finish(arguments, **keys):
    assert start(arguments, **keys).wait(timeout=300) == 0


def records(run):
    """The run's metrics without what depends on the clock."""
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in metrics.read(run / "metrics.jsonl")]


def final(run):
    """Every tensor of the newest checkpoint, as bytes."""
    path = checkpoint.find(run)
    tensors = load_tensors(path / "model.safetensors") | load_tensors(path / "optimizer.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def phase_of(run) -> str:
    """What the run is doing, by what it has written."""
    if list(run.glob("checkpoints/*.tmp")):
        return "saving"
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    if not lines:
        return "starting"
    last = lines[-1]
    due = last.startswith(b'{"step": ') and int(last[9:].partition(b",")[0]) % 4 == 0
    return "evaluation" if due and b"val_loss" not in last else "training"


LONG = {"hidden_size": 96, "eval_interval": 4, "eval_batches": 30, "checkpoint_interval": 3, "max_steps": 40}


@pytest.mark.parametrize(
    ("dtype", "kills"),
    [
        ("float32", 4),
        pytest.param("float32", 25, marks=pytest.mark.slow),
        pytest.param("bfloat16", 25, marks=pytest.mark.slow),
    ],
)
def test_killed_runs_end_bit_for_bit_as_the_whole_one(corpus, tmp_path, dtype, kills):
    keys = {**LONG, "dtype": dtype, "resume": "auto"}
    finish(small_run(corpus, tmp_path / "whole", **keys))
    run, draw, killed = tmp_path / "run", random.Random(kills), collections.Counter()
    wanted = [phase for phase, count in (("training", 10), ("evaluation", 7), ("saving", 8)) for _ in range(count)]
    draw.shuffle(wanted)
    for phase in wanted[:kills]:
        process = start(small_run(corpus, run, **keys))
        seen = metrics_size(run)
        while process.poll() is None:
            # Kill within the wanted phase of work that is new, at a random moment of it; stopped, to see what it is.
            if metrics_size(run) != seen and phase_of(run) == phase:
                time.sleep(draw.random() * 0.01)
                process.send_signal(signal.SIGSTOP)
                if phase_of(run) == phase:
                    killed[phase] += 1
                    process.kill()
                    break
                process.send_signal(signal.SIGCONT)
            time.sleep(0.0005)
        process.wait()
    print(dict(killed))
    assert sum(killed.values()) >= kills - 2
    if kills == 25:
        assert all(killed[phase] >= 5 for phase in ("training", "evaluation", "saving")), killed
    finish(small_run(corpus, run, **keys))
    assert final(run) == final(tmp_path / "whole")
    assert records(run) == records(tmp_path / "whole")


def metrics_size(run):
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


CONSTANT = {"schedule": "wsd", "decay_steps": 0, "eval_full": False, "resume": "auto"}


def test_processes_and_engines_change_within_a_run(corpus, tmp_path):
    keys = {**CONSTANT, "checkpoint_interval": 100, "statistics_interval": 5}
    finish(small_run(corpus, tmp_path / "one", **keys, max_steps=20))
    run = tmp_path / "run"
    finish(small_run(corpus, run, **keys, max_steps=5))
    finish(small_run(corpus, run, **keys, max_steps=10), processes=2)
    fsdp = {"engine": "fsdp", "activation_checkpointing": True}
    finish(small_run(corpus, run, **keys, max_steps=15, **fsdp), processes=2)
    finish(small_run(corpus, run, **keys, max_steps=20))
    ours, theirs = ([r for r in records(path) if "loss" in r] for path in (run, tmp_path / "one"))
    assert [r["step"] for r in ours] == list(range(1, 21))
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert max(abs(a["grad_norm"] - b["grad_norm"]) for a, b in zip(ours, theirs)) < 1e-3
    residual = [
        [r["residual"]["ddl_attn.beta_mean"] for r in records(path) if "residual" in r]
        for path in (run, tmp_path / "one")
    ]
    assert torch.tensor(residual[0]).shape == (4, 2)
    assert torch.allclose(*map(torch.tensor, residual), atol=1e-4)
    weights = [load_tensors(checkpoint.find(path) / "model.safetensors") for path in (run, tmp_path / "one")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(value, weights[1][name], atol=1e-4) for name, value in weights[0].items())


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def steps_done(run):
    return (
        [r["step"] for r in metrics.read(run / "metrics.jsonl") if "loss" in r]
        if (run / "metrics.jsonl").exists()
        else []
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_with_a_code_of_its_own(corpus, tmp_path, number):
    run = tmp_path / "run"
    keys = {**CONSTANT, "checkpoint_interval": 10_000, "max_steps": 10_000}
    process = start(small_run(corpus, run, **keys))
    wait_for(lambda: len(steps_done(run)) > 3)
    process.send_signal(number)
    assert process.wait(timeout=20) == stopping.EXIT_CODE == 75
    done = steps_done(run)
    assert done == list(range(1, len(done) + 1))
    assert checkpoint.read_state(checkpoint.find(run))["step"] == done[-1]
    finish(small_run(corpus, run, **{**keys, "max_steps": done[-1] + 2}))
    assert steps_done(run) == list(range(1, done[-1] + 3))


def test_the_second_signal_ends_the_process_at_once():
    code = (
        "import time; from training.stopping import Stop; s = Stop(None); print(s.reason(), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"None\n"
    for _ in range(2):  # the launcher's copy of the same signal
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    time.sleep(stopping.SAME_EVENT)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert process.stderr.read() == b"SIGTERM: stopping after this step; a second one ends at once, unsaved\n"


def test_a_stop_within_an_evaluation_does_it_again(corpus, tmp_path):
    keys = {**CONSTANT, "eval_interval": 3, "eval_batches": 400, "max_steps": 6, "checkpoint_interval": 100}
    finish(small_run(corpus, tmp_path / "whole", **keys))
    run = tmp_path / "run"
    process = start(small_run(corpus, run, **keys))
    wait_for(lambda: steps_done(run)[-1:] == [3])
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == stopping.EXIT_CODE
    assert not checkpoint.read_state(checkpoint.find(run))["evaluated"]
    assert all("val_loss" not in record for record in records(run))
    finish(small_run(corpus, run, **keys))
    assert records(run) == records(tmp_path / "whole")
    assert final(run) == final(tmp_path / "whole")


def test_granted_time_ends_a_run(corpus, tmp_path):
    run = tmp_path / "run"
    arguments = small_run(corpus, run, **CONSTANT, max_steps=100_000, max_seconds=4.0, checkpoint_interval=100_000)
    begin = time.monotonic()
    result = script("train.py", *arguments)
    assert result.returncode == stopping.EXIT_CODE
    assert time.monotonic() - begin < 30
    assert "stopped (max_seconds=4)" in result.stdout.decode()
    assert checkpoint.read_state(checkpoint.find(run))["step"] == steps_done(run)[-1]


def test_granted_time_leaves_room_for_a_step_and_a_save(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    stop = stopping.Stop(10.0)
    stop.step_took(60.0)  # compiles
    assert stop.reason() is None
    stop.step_took(2.0)
    stop.save_took(3.0)
    now[0] = 104.9
    assert stop.reason() is None
    now[0] = 105.0
    assert stop.reason() == "max_seconds=10"
    assert stopping.Stop(None).reason() is None


def test_two_processes_are_stopped_by_a_signal_to_their_launcher(corpus, tmp_path):
    run = tmp_path / "run"
    keys = {**CONSTANT, "checkpoint_interval": 10_000, "max_steps": 10_000}
    process = start(small_run(corpus, run, **keys), processes=2)
    wait_for(lambda: len(steps_done(run)) > 3)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)
    done = steps_done(run)
    assert checkpoint.read_state(checkpoint.find(run))["step"] == done[-1]
    assert done == list(range(1, len(done) + 1))


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_dead_process_ends_the_job_which_restarts_where_asked(corpus, tmp_path, restarts):
    run = tmp_path / "run"
    keys = {**CONSTANT, "checkpoint_interval": 5, "max_steps": 10_000 if restarts == 0 else 150}
    process = start(small_run(corpus, run, **keys), processes=2, launcher=[f"--max-restarts={restarts}"])
    wait_for(lambda: len(steps_done(run)) > 12)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "train.py"], capture_output=True, check=True
    ).stdout.split()
    assert len(children) == 2
    os.kill(int(children[restarts]), signal.SIGKILL)
    begin = time.monotonic()
    code = process.wait(timeout=120)
    if restarts:
        assert code == 0
        assert steps_done(run) == list(range(1, 151))
    else:
        assert code == 1
        assert time.monotonic() - begin < 60
        assert checkpoint.find(run)


def test_a_full_disk_leaves_the_run_going_and_the_old_checkpoint(corpus, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    keys = {**CONSTANT, "checkpoint_interval": 20, "keep_last": 1, "max_steps": 100_000, "hidden_size": 64}
    with open(log, "w") as file:
        process = start(small_run(corpus, run, **keys), log=file)
    wait_for(lambda: checkpoint.all_of(run))
    # From now on no file of this process may grow beyond 100 kB: the kernel refuses the write as on a full disk.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    wait_for(lambda: log.read_text().count("no checkpoint (") >= 2)
    old = checkpoint.find(run)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 1
    assert "is not saved: free disk space" in log.read_text()
    assert checkpoint.all_of(run) == [old]
    assert not list(run.glob("checkpoints/*.tmp"))
    step = checkpoint.read_state(old)["step"]
    finish(small_run(corpus, run, **{**keys, "max_steps": step + 5}))
    assert steps_done(run) == list(range(1, step + 6))


def test_a_removed_run_folder_is_said_at_once_and_made_again(corpus, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    keys = {**CONSTANT, "checkpoint_interval": 100_000, "max_steps": 100_000}
    with open(log, "w") as file:
        process = start(small_run(corpus, run, **keys), log=file)
    wait_for(lambda: len(steps_done(run)) > 3)
    shutil.rmtree(run)
    wait_for(lambda: "metrics.jsonl was removed while the run writes to it" in log.read_text())
    wait_for(lambda: len(steps_done(run)) > 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75
    assert checkpoint.read_state(checkpoint.find(run))["step"] == steps_done(run)[-1]
    assert log.read_text().count("was removed") == 1


def test_a_removed_file_of_metrics_that_cannot_be_made_again_waits(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    file = metrics.LineFile(folder / "metrics.jsonl")
    shutil.rmtree(folder)
    folder.touch()  # a file where the folder was
    file.write({"step": 1})
    file.write({"step": 2})
    folder.unlink()
    file.write({"step": 3})
    assert [record["step"] for record in metrics.read(folder / "metrics.jsonl")][-1] == 3


def test_metrics_that_cannot_be_written_wait(tmp_path, monkeypatch):
    file = metrics.LineFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    whole, room = file.file, [5]

    class Full:
        fileno = whole.fileno

        def write(self, data):
            if not room[0]:
                raise OSError(28, "No space left on device")
            count = whole.write(data[: room[0]])
            room[0] -= count
            return count

    monkeypatch.setattr(file, "file", Full())
    for step in (2, 3):
        file.write({"step": step})
    room[0] = 1000
    file.write({"step": 4})
    assert [r["step"] for r in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_steps_that_are_no_number_are_skipped_up_to_a_limit(corpus, tmp_path):
    run = tmp_path / "run"
    keys = {
        "embedding_init_std": 1e30,
        "checkpoint_interval": 1,
        "skip_nonfinite": 2,
        "max_steps": 5,
        "eval_interval": 9,
    }
    result = script("train.py", *small_run(corpus, run, **keys))
    assert result.returncode == 1
    assert "step 3: loss" in result.stderr.decode()
    assert [r for r in records(run) if r.get("skipped")] == [r for r in records(run) if r["step"] in (1, 2)]
    assert checkpoint.read_state(checkpoint.find(run))["skipped"] == 2


def test_processes_that_differ_are_refused(corpus, tmp_path):
    wrapper = tmp_path / "differ.py"
    wrapper.write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "sys.argv = ['train.py', *sys.argv[1:], f'--seed={os.environ[\"RANK\"]}']\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", wrapper]
    result = subprocess.run(
        [*map(str, command), *small_run(corpus, tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert result.returncode
    assert "process 1 and process 0 differ in the configuration" in result.stderr.decode()
    assert not (tmp_path / "run").exists()


def test_a_missing_tensorboard_is_named(corpus, tmp_path):
    (tmp_path / "tensorboard.py").write_text("raise ImportError")
    arguments = small_run(corpus, tmp_path / "run", tensorboard=True)
    error = one_line_error(script("train.py", *arguments, env={"PYTHONPATH": str(tmp_path)}))
    assert "tensorboard=True needs the tensorboard package: pip install tensorboard" in error
    assert not (tmp_path / "run").exists()


def test_output_that_nobody_takes_does_not_end_a_run(corpus, tmp_path):
    run = tmp_path / "full"
    with open("/dev/full", "w") as full:
        assert start(small_run(corpus, run, **CONSTANT), log=full).wait(timeout=60) == 0
    assert checkpoint.read_state(checkpoint.find(run))["step"] == 6
    run = tmp_path / "pipe"
    keys = {**CONSTANT, "checkpoint_interval": 10_000, "max_steps": 100_000, "log_interval": 1}
    process = start(small_run(corpus, run, **keys), log=subprocess.PIPE)
    wait_for(lambda: len(steps_done(run)) > 3)
    process.stdout.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == stopping.EXIT_CODE
    assert checkpoint.read_state(checkpoint.find(run))["step"] == steps_done(run)[-1]


def test_granted_time_is_not_granted_again_by_restarts(corpus, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    keys = {**CONSTANT, "max_seconds": 3.0, "checkpoint_interval": 10_000, "max_steps": 100_000}
    with open(log, "w") as file:
        process = start(small_run(corpus, run, **keys), processes=2, launcher=["--max-restarts=2"], log=file)
        assert process.wait(timeout=90) == 0
    assert log.read_text().count("stopped (max_seconds=3)") == 1
    assert log.read_text().count("run folder") == 1


def test_one_process_at_a_time_trains_in_a_folder(corpus, tmp_path):
    run = tmp_path / "run"
    process = start(small_run(corpus, run, **CONSTANT, max_steps=100_000))
    wait_for(lambda: len(steps_done(run)) > 1)
    second = script("train.py", *small_run(corpus, run, **CONSTANT, max_steps=100_000))
    assert "another process trains there" in one_line_error(second)
    process.kill()
    process.wait()
    done = steps_done(run)
    assert done == list(range(1, len(done) + 1))


def test_a_stop_in_an_evaluation_past_the_last_step_is_the_end(corpus, tmp_path):
    run = tmp_path / "run"
    finish(small_run(corpus, run, **CONSTANT))
    path = checkpoint.find(run)
    state = checkpoint.read_state(path)
    (path / "state.json").write_text(json.dumps({**state, "evaluated": False}))
    sign(path)
    result = script("train.py", *small_run(corpus, run, **CONSTANT, max_steps=5))
    assert result.returncode == 0
    assert "nothing to train" in result.stdout.decode()


def test_a_run_goes_on_with_its_corpus_elsewhere(corpus, tmp_path):
    run = tmp_path / "run"
    finish(small_run(corpus, run, **CONSTANT))
    shutil.copytree(corpus, tmp_path / "elsewhere")
    finish(small_run(tmp_path / "elsewhere", run, **CONSTANT, max_steps=8))
    assert steps_done(run) == list(range(1, 9))


def test_skipped_from_the_start_a_run_can_go_on(corpus, tmp_path):
    keys = {"embedding_init_std": 1e30, "checkpoint_interval": 1, "skip_nonfinite": 9, "eval_interval": 9, **CONSTANT}
    run = tmp_path / "run"
    # The evaluation after the last step is not finite either, and is written as such.
    finish(small_run(corpus, run, **keys, max_steps=2))
    finish(small_run(corpus, run, **keys, max_steps=4))
    assert [r["step"] for r in records(run) if r.get("skipped")] == [1, 2, 3, 4]


def test_the_parameter_where_it_began_is_named():
    model = build("DDL-gpt-mha-rope", **SMALL)
    _, loss = model(torch.randint(0, 260, (2, 8)), torch.randint(0, 260, (2, 8)))
    loss.backward()
    model.transformer.h[1].mlp.c_proj.weight.grad[3, 2] = math.nan
    assert math.isnan(distributed.clip_gradients(model, 1.0))
    world = World(0, 1, torch.device("cpu"))
    assert distributed.non_finite_gradients(model, world) == ["transformer.h.1.mlp.c_proj.weight"]


def test_clipping_is_that_of_torch():
    gradients = []
    for clip in (
        lambda model: distributed.clip_gradients(model, 0.1),
        lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1).item(),
    ):
        torch.manual_seed(0)
        model = build("DDL-gpt-mha-rope", **SMALL)
        ids = torch.randint(0, 260, (2, 8))
        model(ids, ids)[1].backward()
        gradients.append((clip(model), [p.grad for p in model.parameters()]))
    assert gradients[0][0] == gradients[1][0]
    assert all(torch.equal(a, b) for a, b in zip(gradients[0][1], gradients[1][1]))


def test_a_line_of_metrics_that_is_no_text_ends_the_reading(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n\xff\xfe\n{"step": 3}\n')
    assert [r["step"] for r in metrics.read(path)] == [1, 2]


def test_a_branch_is_another_run_for_wandb(corpus, tmp_path):
    first, branch = tmp_path / "first", tmp_path / "branch"
    keys = {**CONSTANT, "wandb_log": True}
    finish(small_run(corpus, first, **keys), WANDB_MODE="offline")
    finish(small_run(corpus, first, **keys, max_steps=8), WANDB_MODE="offline")
    finish(small_run(corpus, branch, **{**keys, "resume": first}, max_steps=10), WANDB_MODE="offline")
    ids = [checkpoint.read_state(path)["wandb_id"] for run in (first, branch) for path in checkpoint.all_of(run)]
    assert len(ids) == 4
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_gradients_are_averaged_with_the_last_micro_batch_alone():
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)  # what no_sync() needs of one
    torch.nn.Module.__init__(ddp)
    ddp.require_backward_grad_sync = True
    for wanted in (False, True):
        with distributed.synchronising(ddp, wanted):
            assert ddp.require_backward_grad_sync is wanted
    calls = []
    fsdp = SimpleNamespace(set_requires_gradient_sync=calls.append)
    for wanted in (False, True):
        with distributed.synchronising(fsdp, wanted):
            assert calls[-1] is wanted


def test_random_numbers_are_a_function_of_seed_step_and_process():
    def draw(seed, step, rank):
        distributed.seed_step(seed, step, World(rank, 4, torch.device("cpu")))
        return torch.rand(8).tolist()

    cases = [(seed, step, rank) for seed in (0, 1) for step in (1, 2, 3) for rank in (0, 1)]
    assert len({tuple(draw(*case)) for case in cases}) == len(cases)
    assert [draw(*case) for case in cases] == [draw(*case) for case in reversed(cases)][::-1]


def test_an_evaluation_that_will_be_done_again_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 2, "val_loss": 1}, {"step": 3, "loss": 2}, {"step": 3, "val_loss": 3}, {"step": 4, "loss": 5}]
    for evaluated, kept in ((True, lines[:3]), (False, lines[:2])):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        metrics.drop_after(path, 3, evaluated)
        assert metrics.read(path) == kept


def test_a_broken_stream_is_tolerated():
    with open("/dev/full", "w") as full:
        stream = stopping.Tolerant(full)
        print("x" * 100_000, file=stream)
        print("x", file=stream, flush=True)
        stream.flush()
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        assert stream.fileno() == full.fileno()
        with contextlib.suppress(OSError):
            full.close()


def test_a_run_keeps_the_checkpoints_it_is_asked_to(corpus, tmp_path):
    run = tmp_path / "run"
    finish(small_run(corpus, run, **CONSTANT, max_steps=8, checkpoint_interval=1, keep_last=1, keep_every=3))
    assert [checkpoint.step_of(path) for path in checkpoint.all_of(run)] == [3, 6, 8]
