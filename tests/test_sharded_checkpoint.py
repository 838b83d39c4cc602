"""Checkpoints that several ranks write and read: the same tensors, complete or absent."""

import functools
import os
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import SMALL, small_run, wait_for
from in_process import call, train_in_processes
from interruptions_helpers import CONSTANT_RATE, completed_steps, read_final_tensors, read_records
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor

from data import tokenizer
from model import build
from training import checkpoint, distributed, optimizer, saver, sharded_checkpoint, stopping
from training.config import TrainConfig, check_run
from training.distributed import World
from training.peers import StorePeers

MODEL = "DDL-gpt-mha-rope"
TOKENIZER = tokenizer.byte_tokenizer().to_json()
# engine, shard_size, whether norms and gates are replicated (bfloat16)
ENGINES = {
    "ddp": ("ddp", None, False),
    "fsdp": ("fsdp", None, False),
    "fsdp_bfloat16": ("fsdp", None, True),
    "hsdp": ("fsdp", 2, False),
}


# ---- helpers ----


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
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=30),
    )
    world = World(rank, num_processes, torch.device("cpu"))
    task(world, folder)
    distributed.stop(world)


def build_trained(world: World, engine: str, seed: int = 0):
    """Return a model and its optimizers after one step, which is the same with every engine."""
    name, shard_size, bfloat16 = ENGINES[engine]
    torch.manual_seed(seed)
    model = build(MODEL, **SMALL)
    distributed.parallelize(
        model, world, engine=name, compile=False, bfloat16=bfloat16, shard_size=shard_size
    )
    optimizers = optimizer.build_optimizers(model, TrainConfig())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    for torch_optimizer in optimizers:
        torch_optimizer.step()
    return model, optimizers


def make_saver(world: World, engine: str, writers: int, background: bool = True):
    name, shard_size, _ = ENGINES[engine]
    config = TrainConfig(
        engine=name,
        shard_size=shard_size,
        checkpoint_writers=writers,
        save_in_background=background,
    )
    return saver.CheckpointSaver(config, world, stopping.Stop(None))


def make_state(step: int) -> dict:
    return {
        "step": step,
        "seconds": 1.0,
        "model": MODEL,
        "model_config": SMALL,
        "run_config": {},
        "corpus": {},
    }


def save_step(checkpoint_saver, run_folder: Path, step: int, model, optimizers) -> bool:
    checkpoint_saver.save(
        run_folder,
        step,
        checkpoint.get_model_tensors(model),
        optimizer.state_by_parameter_name(optimizers),
        make_state(step),
        TOKENIZER,
    )
    return checkpoint_saver.wait()


def in_threads(num_threads: int, task) -> list:
    """Call task(peers) in threads that exchange values like ranks; return results or errors."""
    store = dist.HashStore()
    results = [None] * num_threads

    def run(rank):
        try:
            results[rank] = task(StorePeers(store, rank, num_threads))
        except Exception as error:  # returned, so that the comparison of the caller fails
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def save_from_threads(run_folder: Path, step: int, num_writers: int = 2) -> Path:
    """Write a checkpoint of several files without other processes."""
    world = World(0, 1, torch.device("cpu"))
    model, optimizers = build_trained(world, "ddp")
    tensors_by_kind = {
        "model": checkpoint.get_model_tensors(model),
        "optimizer": optimizer.state_by_parameter_name(optimizers),
    }
    path = checkpoint.name_folder(run_folder, step)

    def write(peers):
        shards = [
            sharded_checkpoint.gather_shard(
                kind, tensors, list(range(num_writers)), peers.rank, copy=False
            )
            for kind, tensors in tensors_by_kind.items()
        ]
        checkpoint.write(path, shards, make_state(step), TOKENIZER, peers)

    assert in_threads(num_writers, write) == [None] * num_writers
    return path


def read_tensors(path: Path, kind: str) -> dict[str, torch.Tensor]:
    return {name: saved[...] for name, saved in sharded_checkpoint.open_tensors(path, kind).items()}


def check_same(tensors: dict, expected: dict) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


# ---- who writes what ----


def test_writers_are_one_per_machine_and_of_the_first_copy():
    assert sharded_checkpoint.choose_writers(2, 16, None) == [0, 8]
    assert sharded_checkpoint.choose_writers(2, 16, 8) == [0, 4]
    assert sharded_checkpoint.choose_writers(9, 4, None) == [0, 1, 2, 3]
    assert sharded_checkpoint.choose_writers(4, 8, 2) == [0, 1]
    assert sharded_checkpoint.choose_writers(4, 1, 8) == [0]  # resumed on fewer processes


def test_bytes_are_balanced():
    sizes = {"embedding": 50, **{f"matrix_{index}": 10 for index in range(5)}, "norm": 1}
    part_of = sharded_checkpoint.balance(sizes, 2)
    totals = [sum(sizes[name] for name in sizes if part_of[name] == part) for part in (0, 1)]
    assert sorted(totals) == [50, 51]
    assert part_of == sharded_checkpoint.balance(dict(reversed(sizes.items())), 2)


def test_more_writers_than_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = TrainConfig(checkpoint_writers=4)
    with pytest.raises(ValueError, match=r"checkpoint_writers=4 exceeds .* \(2\); give 1 to 2"):
        check_run(config, {})
    check_run(config, {"checkpoint_writers": 4})  # resumed with fewer processes


# ---- bringing tensors together ----

SHAPES = [(9, 3), (4, 2, 2), (3,), (1, 5), (0, 2), (8,)]


def collect_odd_shapes(world: World, folder: Path) -> None:
    sharded_checkpoint.BATCH_BYTES = 64  # several batches
    mesh = distributed.build_mesh(world, None)
    tensors = {}
    for index, shape in enumerate(SHAPES):
        full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + index
        tensors[f"sharded_{index}"] = distribute_tensor(full, mesh, [Shard(0)])
        tensors[f"replicated_{index}"] = full
    tensors["step"] = torch.tensor(3.0)
    writer_of = {name: index % world.world_size for index, name in enumerate(tensors)}
    collected = sharded_checkpoint.collect(tensors, writer_of, world.rank, copy=True)
    assert collected.keys() == {name for name in tensors if writer_of[name] == world.rank}
    for name, tensor in collected.items():
        full = tensors[name.replace("sharded", "replicated")]
        assert torch.equal(tensor, full)
        assert tensor.data_ptr() != full.data_ptr() or not full.numel()


def read_own_rows(world: World, folder: Path) -> None:
    path = save_from_threads(folder / f"rank_{world.rank}", 1)
    model, optimizers = build_trained(world, "fsdp", seed=1)
    num_rows = []
    read = sharded_checkpoint.SavedTensor.__getitem__

    def record(saved, rows):
        tensor = read(saved, rows)
        if saved.shape:
            num_rows.append((len(tensor), saved.shape[0]))
        return tensor

    sharded_checkpoint.SavedTensor.__getitem__ = record
    sharded_checkpoint.load_model_tensors(model, path)
    saved = sharded_checkpoint.open_tensors(path, "optimizer")
    optimizer.load_state_by_parameter_name(optimizers, saved)
    assert len(num_rows) == 3 * len(list(model.parameters()))
    assert all(count <= -(-total // world.world_size) for count, total in num_rows)


def test_a_rank_reads_only_its_rows(tmp_path):
    run_processes(read_own_rows, 2, tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    world = World(0, 1, torch.device("cpu"))
    model, _ = build_trained(world, "ddp")
    with torch.no_grad():
        model.transformer.wte.weight[3, 2] = torch.nan
    path = checkpoint.save(
        tmp_path, checkpoint.get_model_tensors(model), {}, make_state(1), TOKENIZER
    )
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight holds NaN or infinite"):
        sharded_checkpoint.load_model_tensors(model, path)


def test_rows_of_any_shape_reach_their_writer(tmp_path):
    run_processes(collect_odd_shapes, 4, tmp_path)


CASES = [("ddp", 2), ("fsdp", 1), ("fsdp", 3), ("fsdp_bfloat16", 4), ("hsdp", 2)]


def save_all_cases(world: World, folder: Path) -> None:
    for engine, writers in CASES:
        model, optimizers = build_trained(world, engine)
        assert save_step(
            make_saver(world, engine, writers), folder / f"{engine}_{writers}", 1, model, optimizers
        )


def load_all_cases(world: World, folder: Path) -> None:
    """Load checkpoints with every engine and compare with what was trained there."""
    local = sharded_checkpoint.local_tensor
    for engine in ("ddp", "fsdp", "fsdp_bfloat16"):
        trained_model, trained_optimizers = build_trained(world, engine)
        for case in ("fsdp_1", "fsdp_3", "hsdp_2"):
            path = checkpoint.name_folder(folder / case, 1)
            model, _ = build_trained(world, engine, seed=1)
            sharded_checkpoint.load_model_tensors(model, path)
            optimizers = optimizer.build_optimizers(model, TrainConfig())
            saved = sharded_checkpoint.open_tensors(path, "optimizer")
            optimizer.load_state_by_parameter_name(optimizers, saved)
            tensors = {**model.state_dict(), **optimizer.state_by_parameter_name(optimizers)}
            expected = {
                **trained_model.state_dict(),
                **optimizer.state_by_parameter_name(trained_optimizers),
            }
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                assert type(tensor) is type(expected[name])
                assert torch.equal(local(tensor), local(expected[name])), name


def test_tensors_do_not_depend_on_engine_processes_and_writers(tmp_path):
    world = World(0, 1, torch.device("cpu"))
    model, optimizers = build_trained(world, "ddp")
    path = checkpoint.save(
        tmp_path / "one",
        checkpoint.get_model_tensors(model),
        optimizer.state_by_parameter_name(optimizers),
        make_state(1),
        TOKENIZER,
    )
    run_processes(save_all_cases, 4, tmp_path)
    for engine, writers in CASES:
        other = checkpoint.find(tmp_path / f"{engine}_{writers}")
        for kind in ("model", "optimizer"):
            check_same(read_tensors(other, kind), load_file(path / f"{kind}.safetensors"))
            num_files = len(list(other.glob(f"{kind}*.safetensors")))
            assert num_files == writers
        subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=other, check=True)
        assert {file.name for file in other.iterdir()} == {
            *checkpoint.list_files(other),
            "SHA256SUMS",
        }
    # one writer writes the files of one process, byte for byte
    for file in path.iterdir():
        same_file = checkpoint.find(tmp_path / "fsdp_1") / file.name
        assert same_file.read_bytes() == file.read_bytes()
    run_processes(load_all_cases, 2, tmp_path)
    load_all_cases(world, tmp_path)


# ---- the background ----


def test_training_continues_while_a_copy_is_written(tmp_path, monkeypatch):
    world = World(0, 1, torch.device("cpu"))
    model, optimizers = build_trained(world, "ddp")
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    may_write = threading.Event()
    write_shards = checkpoint.write_shards

    def write_later(*arguments):
        may_write.wait()
        return write_shards(*arguments)

    monkeypatch.setattr(checkpoint, "write_shards", write_later)
    checkpoint_saver = make_saver(world, "ddp", 1)
    checkpoint_saver.save(
        tmp_path,
        1,
        checkpoint.get_model_tensors(model),
        optimizer.state_by_parameter_name(optimizers),
        make_state(1),
        TOKENIZER,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert checkpoint.list_checkpoints(tmp_path) == []
    may_write.set()
    assert checkpoint_saver.wait()
    saved = read_tensors(checkpoint.find(tmp_path), "model")
    for name, tensor in saved.items():
        assert torch.equal(tensor, trained[name])


def test_a_bug_in_the_background_ends_the_run(tmp_path, monkeypatch):
    world = World(0, 1, torch.device("cpu"))
    monkeypatch.setattr(checkpoint, "write", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_step(make_saver(world, "ddp", 1), tmp_path, 1, *build_trained(world, "ddp"))


def save_and_fail(world: World, folder: Path) -> None:
    """Save twice; the second time the disk of writer 1 is full."""
    model, optimizers = build_trained(world, "fsdp")
    checkpoint_saver = make_saver(world, "fsdp", 2)
    assert save_step(checkpoint_saver, folder / "run", 1, model, optimizers)
    if world.rank == 1:
        checkpoint.save_tensors = raise_disk_full
    saved = save_step(checkpoint_saver, folder / "run", 2, model, optimizers)
    # only the main process knows
    assert saved == (not world.is_main)


def raise_disk_full(file: Path, tensors: dict) -> None:
    file.write_bytes(b"partial")
    raise OSError("No space left on device")


def test_a_full_disk_of_one_writer_leaves_the_earlier_checkpoint(tmp_path, capfd):
    run_processes(save_and_fail, 2, tmp_path)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]
    checkpoint.find(tmp_path / "run")
    message = (
        "warning: could not save the checkpoint of step 2 (writer 1: No space left on device); "
        "the previous one is kept"
    )
    assert capfd.readouterr().err.count(message) == 1


def save_and_die(function: str, victim: int, world: World, folder: Path) -> None:
    """Save twice; the second time a rank dies when it calls a function of checkpoint.py."""
    model, optimizers = build_trained(world, "fsdp")
    checkpoint_saver = make_saver(world, "fsdp", 2)
    assert save_step(checkpoint_saver, folder / "run", 1, model, optimizers)
    if world.rank == victim:
        setattr(checkpoint, function, lambda *arguments: os._exit(9))
    save_step(checkpoint_saver, folder / "run", 2, model, optimizers)
    if not world.is_main:  # its part was done before the main process died
        os._exit(9)


@pytest.mark.parametrize(
    ("function", "victim"),
    [
        ("create_folder", 0),
        ("write_shards", 1),
        ("compute_checksum_line", 0),
        ("compute_checksum_line", 1),
        ("write_other_files", 0),
        ("replace_folder", 0),
        ("fsync", 1),
    ],
)
def test_a_kill_within_a_save_leaves_the_earlier_checkpoint(tmp_path, function, victim):
    task = functools.partial(save_and_die, function, victim)
    with pytest.raises(Exception, match=r"terminated|Connection|peer"):
        run_processes(task, 2, tmp_path)
    assert checkpoint.list_checkpoints(tmp_path / "run") == [checkpoint.find(tmp_path / "run")]
    assert checkpoint.find(tmp_path / "run").name == "step_00000001"
    # the next save removes what the killed one has left
    path = save_from_threads(tmp_path / "run", 2)
    assert checkpoint.find(tmp_path / "run") == path
    assert not list(path.parent.glob("*.tmp"))


# ---- damage ----


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model-00002-of-00002.safetensors", flip_last_byte),
        ("optimizer-00001-of-00002.safetensors", flip_last_byte),
        ("optimizer-00002-of-00002.safetensors", Path.unlink),
        ("model.safetensors.index.json", flip_last_byte),
        ("optimizer.safetensors.index.json", Path.unlink),
        ("SHA256SUMS", flip_last_byte),
        ("state.json", flip_last_byte),
    ],
)
def test_a_damaged_file_is_found_by_all_ranks_and_its_checkpoint_skipped(
    tmp_path, capsys, name, damage
):
    earlier = save_from_threads(tmp_path, 1)
    path = save_from_threads(tmp_path, 2)
    damage(path / name)
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.verify(path)
    latest = in_threads(3, lambda peers: checkpoint.find_latest(tmp_path, peers))
    assert latest == [earlier] * 3
    assert capsys.readouterr().err.count("step_00000002 is damaged") == 1


def test_each_file_is_hashed_by_one_rank(tmp_path, monkeypatch):
    path = save_from_threads(tmp_path, 1)
    hashed = []
    compute_checksum_line = checkpoint.compute_checksum_line

    def record(file):
        hashed.append(file.name)
        return compute_checksum_line(file)

    monkeypatch.setattr(checkpoint, "compute_checksum_line", record)
    assert in_threads(3, lambda peers: checkpoint.verify(path, peers)) == [None] * 3
    assert sorted(hashed) == sorted(checkpoint.list_files(path))


def test_ranks_that_see_different_checkpoints_are_refused(tmp_path):
    for rank in (0, 1):
        save_from_threads(tmp_path / f"machine_{rank}", rank)
    errors = in_threads(
        2, lambda peers: checkpoint.find_latest(tmp_path / f"machine_{peers.rank}", peers)
    )
    assert all("give an --out_dir that all machines share" in str(error) for error in errors)


# ---- runs ----


def test_an_export_reads_several_files(tmp_path):
    path = save_from_threads(tmp_path / "run", 1)
    assert (path / "model-00002-of-00002.safetensors").is_file()
    result = call("export.py", tmp_path / "run", tmp_path / "exported")
    assert result.returncode == 0, result.stderr.decode()
    exported, _, _ = checkpoint.load_model(tmp_path / "exported", "cpu")
    model, _, _ = checkpoint.load_model(tmp_path / "run", "cpu")
    check_same(exported.state_dict(), model.state_dict())


def test_saving_in_the_background_does_not_change_a_run(corpus, tmp_path):
    for background in (True, False):
        arguments = small_run(
            corpus,
            tmp_path / str(background),
            **CONSTANT_RATE,
            checkpoint_interval=1,
            max_steps=4,
            save_in_background=background,
        )
        result = call("train.py", *arguments)
        assert result.returncode == 0, result.stderr.decode()
        assert result.stdout.decode().count("saved ") == 4
    assert read_final_tensors(tmp_path / "True") == read_final_tensors(tmp_path / "False")
    assert not list(tmp_path.glob("*/checkpoints/*.tmp"))


def test_a_stop_waits_for_the_save(corpus, tmp_path, monkeypatch):
    write_shards = checkpoint.write_shards

    def write_slowly(*arguments):
        time.sleep(0.3)
        return write_shards(*arguments)

    monkeypatch.setattr(checkpoint, "write_shards", write_slowly)
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


@pytest.mark.slow
def test_runs_of_several_writers_resume_with_other_numbers_of_processes(corpus, tmp_path):
    """The weights are those of runs with one writer in the foreground, to the bit."""
    for name, writers, background in (("one", 1, False), ("several", 4, True)):
        run = tmp_path / name
        for processes, steps, engine in ((4, 2, "fsdp"), (1, 3, "ddp"), (2, 4, "fsdp")):
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
            # a resumed run has the number of writers from its checkpoint
            if processes == 4:
                arguments.append(f"--checkpoint_writers={writers}")
            if processes == 1:
                assert call("train.py", *arguments).returncode == 0
                continue
            assert "arning" not in train_in_processes(processes, arguments, tmp_path / "log")
        assert completed_steps(run) == [1, 2, 3, 4]
    assert len(list(checkpoint.find(tmp_path / "several").glob("model-*"))) == 2
    assert read_final_tensors(tmp_path / "one") == read_final_tensors(tmp_path / "several")
    assert read_records(tmp_path / "one") == read_records(tmp_path / "several")
