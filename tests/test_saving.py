"""Checkpoints of any engine and number of processes, in the foreground and in the background."""

import functools
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import SMALL, small_run, wait_for
from in_process import call, train_in_processes
from torch.distributed.tensor import DTensor
from training_runs import CONSTANT_RATE, completed_steps, read_final_tensors, read_records

from data import tokenizer
from model import build
from training import checkpoint, distributed, optimizer, stopping
from training.checkpoint import CheckpointSaver
from training.config import TrainConfig
from utils import processes
from utils.processes import World

MODEL = "DDL-gpt-mha-rope"
TOKENIZER = tokenizer.byte_tokenizer().to_json()
ENGINES = {"ddp": ("ddp", None), "fsdp": ("fsdp", None), "hsdp": ("fsdp", 2)}
ALONE = World(0, 1, torch.device("cpu"))


def run_processes(task, num_processes: int, folder: Path) -> None:
    """Call task(world, folder) in forks of this process that form a gloo group."""
    folder.mkdir(exist_ok=True)
    meeting = folder / f"meeting_{len(list(folder.glob('meeting_*')))}"
    torch.multiprocessing.start_processes(
        functools.partial(run_one, task, num_processes),
        (folder, meeting),
        nprocs=num_processes,
        start_method="fork",
    )


def run_one(task, num_processes: int, rank: int, folder: Path, meeting: Path) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=30),
    )
    world = World(rank, num_processes, torch.device("cpu"))
    task(world, folder)
    processes.stop(world)


def build_trained(world: World, engine: str, seed: int = 0):
    """Return a model and its optimizers after one step, which is the same with every engine."""
    name, shard_size = ENGINES[engine]
    torch.manual_seed(seed)
    model = build(MODEL, **SMALL)
    distributed.parallelize(model, world, engine=name, compile=False, shard_size=shard_size)
    optimizers = optimizer.build_optimizers(model, TrainConfig())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    for torch_optimizer in optimizers:
        torch_optimizer.step()
    return model, optimizers


def save_step(run_folder: Path, step: int, model, optimizers, background: bool = True) -> bool:
    config = TrainConfig(save_in_background=background)
    saver = CheckpointSaver(config, TOKENIZER, torch.device("cpu"), stopping.Stop(None))
    begin_save(saver, run_folder, step, model, optimizers)
    return saver.wait()


def begin_save(saver, run_folder: Path, step: int, model, optimizers) -> None:
    state = {
        "step": step,
        "seconds": 1.0,
        "model": MODEL,
        "model_config": SMALL,
        "run_config": {},
        "corpus": {},
    }
    tensors_by_file = {
        "model.safetensors": checkpoint.get_model_tensors(model),
        "optimizer.safetensors": optimizer.state_by_parameter_name(optimizers),
    }
    saver.save(run_folder, tensors_by_file, state)


# ---- engines ----


def save_with_every_engine(world: World, folder: Path) -> None:
    for engine in ENGINES:
        assert save_step(folder / engine, 1, *build_trained(world, engine))


def load_with_every_engine(world: World, folder: Path) -> None:
    """Load a checkpoint of the optimizer, and compare it with what was trained here."""
    saved = checkpoint.load_tensors(checkpoint.find(folder / "hsdp") / "optimizer.safetensors")
    for engine in ("ddp", "fsdp"):
        model, trained_optimizers = build_trained(world, engine)
        optimizers = optimizer.build_optimizers(model, TrainConfig())
        optimizer.load_state_by_parameter_name(optimizers, saved)
        loaded = optimizer.state_by_parameter_name(optimizers)
        expected = optimizer.state_by_parameter_name(trained_optimizers)
        assert loaded.keys() == expected.keys()
        for name, tensor in loaded.items():
            assert type(tensor) is type(expected[name])
            assert torch.equal(own_rows(tensor), own_rows(expected[name])), name
            # a rank keeps no rows of others
            num_bytes = own_rows(tensor).untyped_storage().nbytes()
            assert num_bytes == own_rows(tensor).numel() * tensor.element_size()


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_checkpoints_do_not_depend_on_the_engine_and_the_number_of_processes(tmp_path):
    assert save_step(tmp_path / "one", 1, *build_trained(ALONE, "ddp"))
    path = checkpoint.find(tmp_path / "one")
    run_processes(save_with_every_engine, 4, tmp_path)
    for engine in ENGINES:
        for file in path.iterdir():
            same_file = checkpoint.find(tmp_path / engine) / file.name
            assert same_file.read_bytes() == file.read_bytes()
    run_processes(load_with_every_engine, 2, tmp_path)


@pytest.mark.slow
def test_a_run_resumes_with_other_numbers_of_processes_and_engines(corpus, tmp_path):
    """The weights are those of a run that saved in the foreground, to the bit."""
    for background in (False, True):
        run = tmp_path / str(background)
        for num_processes, steps, engine in ((4, 2, "fsdp"), (1, 3, "ddp"), (2, 4, "fsdp")):
            arguments = small_run(
                corpus,
                run,
                **CONSTANT_RATE,
                checkpoint_interval=2,
                micro_batch_size=1,
                num_hidden_layers=1,
                max_steps=steps,
                engine=engine,
                save_in_background=background,
            )
            if num_processes == 1:
                assert call("train.py", *arguments).returncode == 0
                continue
            assert "arning" not in train_in_processes(num_processes, arguments, tmp_path / "log")
        assert completed_steps(run) == [1, 2, 3, 4]
    assert read_final_tensors(tmp_path / "False") == read_final_tensors(tmp_path / "True")
    assert read_records(tmp_path / "False") == read_records(tmp_path / "True")


# ---- the background ----


def test_training_continues_while_a_copy_is_written(tmp_path, monkeypatch):
    model, optimizers = build_trained(ALONE, "ddp")
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    may_write = threading.Event()
    save = checkpoint.save

    def save_later(*arguments):
        may_write.wait()
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "save", save_later)
    config = TrainConfig(save_in_background=True)
    saver = CheckpointSaver(config, TOKENIZER, torch.device("cpu"), stopping.Stop(None))
    begin_save(saver, tmp_path, 1, model, optimizers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert checkpoint.list_checkpoints(tmp_path) == []
    may_write.set()
    assert saver.wait()
    saved = checkpoint.load_tensors(checkpoint.find(tmp_path) / "model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(tensor, trained[name])


def test_a_bug_in_the_background_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "save", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_step(tmp_path, 1, *build_trained(ALONE, "ddp"))


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, capsys):
    model, optimizers = build_trained(ALONE, "ddp")
    assert save_step(tmp_path, 1, model, optimizers)
    monkeypatch.setattr(checkpoint, "save_tensors", raise_disk_full)
    assert not save_step(tmp_path, 2, model, optimizers)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    message = (
        "warning: could not save the checkpoint of step 2 (No space left on device); the previous "
        "one is kept"
    )
    assert capsys.readouterr().err.count(message) == 1


def raise_disk_full(file: Path, tensors: dict) -> None:
    file.write_bytes(b"partial")
    raise OSError("No space left on device")


def test_saving_in_the_background_does_not_change_a_run(corpus, tmp_path):
    for background in (True, False):
        arguments = small_run(
            corpus,
            tmp_path / str(background),
            **CONSTANT_RATE,
            checkpoint_interval=1,
            max_steps=4,
            ema_half_life=2,
            save_in_background=background,
        )
        result = call("train.py", *arguments)
        assert result.returncode == 0, result.stderr.decode()
        assert result.stdout.decode().count("saved ") == 4
    assert read_final_tensors(tmp_path / "True") == read_final_tensors(tmp_path / "False")
    assert not list(tmp_path.glob("*/checkpoints/*.tmp"))


def test_a_stop_waits_for_the_save(corpus, tmp_path, monkeypatch):
    save = checkpoint.save

    def save_slowly(*arguments):
        time.sleep(0.3)
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "save", save_slowly)
    run = tmp_path / "run"
    arguments = small_run(
        corpus,
        run,
        **CONSTANT_RATE,
        checkpoint_interval=5,
        max_steps=10_000,
        save_in_background=True,
    )

    def stop_run():
        wait_for(lambda: len(completed_steps(run)) > 6)
        os.kill(os.getpid(), signal.SIGTERM)

    stop = threading.Thread(target=stop_run, daemon=True)
    stop.start()
    result = call("train.py", *arguments)
    stop.join()
    assert result.returncode == stopping.EXIT_CODE, result.stderr.decode()
    latest = checkpoint.find(run)
    assert checkpoint.read_state(latest)["step"] == completed_steps(run)[-1]
    assert result.stdout.decode().splitlines()[-2] == f"saved {latest}"
    assert not list(run.glob("checkpoints/*.tmp"))
