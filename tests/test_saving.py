"""Checkpoints of any engine and number of processes."""

from pathlib import Path

import torch
from helpers import SMALL
from in_process import run_on_ranks
from torch.distributed.tensor import DTensor
from training_runs import write_checkpoint

from model import build
from training import checkpoint, distributed, optimizer
from training.config import TrainConfig
from utils.processes import World

MODEL = "DDL-gpt-mha-rope"
ENGINES = {"ddp": ("ddp", None), "fsdp": ("fsdp", None), "hsdp": ("fsdp", 2)}


def build_trained(world: World, engine: str):
    """Return a model and its optimizers after one step, which is the same with every engine."""
    name, shard_size = ENGINES[engine]
    torch.manual_seed(0)
    model = build(MODEL, **SMALL)
    distributed.parallelize(model, world, engine=name, compile=False, shard_size=shard_size)
    optimizers = optimizer.build_optimizers(model, TrainConfig())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    for torch_optimizer in optimizers:
        torch_optimizer.step()
    return model, optimizers


def save_trained(run: Path, world: World, engine: str) -> None:
    model, optimizers = build_trained(world, engine)
    tensors_by_file = {
        "model.safetensors": checkpoint.get_model_tensors(model),
        "optimizer.safetensors": optimizer.state_by_parameter_name(optimizers),
    }
    complete = {name: checkpoint.gather_tensors(t) for name, t in tensors_by_file.items()}
    if world.is_main:
        write_checkpoint(run, 1, complete, MODEL, **SMALL)


def save_with_every_engine(world: World, folder: Path) -> None:
    for engine in ENGINES:
        save_trained(folder / engine, world, engine)


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
    save_trained(tmp_path / "one", World(0, 1, torch.device("cpu")), "ddp")
    path = checkpoint.find(tmp_path / "one")
    run_on_ranks(save_with_every_engine, 4, tmp_path)
    for engine in ENGINES:
        for file in path.iterdir():
            same_file = checkpoint.find(tmp_path / engine) / file.name
            assert same_file.read_bytes() == file.read_bytes()
    run_on_ranks(load_with_every_engine, 2, tmp_path)
