"""The dry run: what a run needs, and what is missing to start it, without training."""

from pathlib import Path

from data.shards import MissingCorpus
from model import cost, kernels, weights
from model.gpt import GPT
from training.batches import Data, open_data
from training.config import TrainConfig
from training.settings import RunSettings
from training.setup import (
    build_model,
    check_corpus,
    check_machine,
    load_initial_weights,
    load_state,
)
from utils import machine, processes
from utils.units import format_bytes


def print_dry_run(settings: RunSettings) -> None:
    """Print the size of a run, and what is missing to start it.

    Raises:
        ValueError: as `setup.start` does
    """
    config = settings.config
    device = processes.pick_device(config.device)
    check_machine(config, device)
    data = None
    missing_data = ""
    try:
        data = open_data(config, settings.model_config)
    except MissingCorpus as error:
        missing_data = f"before training: {error}"
    if data is not None and settings.resume_checkpoint is not None:
        check_corpus(settings, data)
    # the run may be too large for this machine; the meta device has no memory
    model = build_model(config, settings.model_config, device, on_meta=config.init_from is None)
    kernels.use(model, config.kernels, device, config.state_checkpoint_interval)
    if settings.resume_checkpoint is not None:
        tensors = weights.load_tensors(settings.resume_checkpoint)
        weights.check_tensors(
            tensors, model, f"{settings.resume_checkpoint} does not fit the model"
        )
    elif config.init_from is not None and data is not None:
        load_initial_weights(model, config.init_from, data)
    if machine.rank() != 0:
        return
    print(describe_run(config, model, data))
    for note in [*settings.notes, *model.config.notes()]:
        print(f"note: {note}")
    out_dir = Path(config.out_dir)
    if settings.resume_checkpoint is not None:
        state = load_state(settings)
        if state.is_complete(config.max_steps):
            print(f"nothing to train: {settings.resume_checkpoint} has {state.step} steps")
        else:
            print(f"this run would resume from {settings.resume_checkpoint}")
    elif out_dir.is_dir() and any(out_dir.iterdir()):
        print(f"note: {out_dir} is not empty: to train, resume that run with --resume=auto")
    if missing_data:
        print(missing_data)


def describe_run(config: TrainConfig, model: GPT, data: Data | None) -> str:
    """Return lines on the parameters, memory, tokens and FLOPs of a run.

    data: None if they have not been prepared
    """
    num_parameters = model.num_parameters()
    num_sequences = config.max_steps * config.global_batch_size
    num_tokens = num_sequences * model.config.block_size
    tokens = (
        f"{config.max_steps:,} steps x {config.global_batch_size} sequences x "
        f"{model.config.block_size} tokens = {num_tokens:,} tokens"
    )
    if data is not None and data.train.num_sequences is not None:
        tokens = f"{tokens}, {num_sequences / data.train.num_sequences:.2f} epochs"
    # float32: the weights and two moments of AdamW (one of Muon), and with ema_half_life the averages
    saved_bytes = 12 * num_parameters if config.ema_half_life is None else 16 * num_parameters
    num_shards = 1
    if config.engine == "fsdp":
        num_shards = min(config.shard_size or machine.world_size(), machine.world_size())
    trained_bytes = (saved_bytes + 4 * num_parameters) / num_shards
    return "\n".join(
        [
            f"{config.model}: {num_parameters:,} parameters",
            f"memory of one process: {format_bytes(trained_bytes)} of weights, gradients and "
            "optimizer state at most, and the activations of a micro-batch",
            tokens,
            f"{num_tokens * cost.flops_per_token(model):.3g} FLOPs",
            f"{format_bytes(saved_bytes)} per checkpoint; the disk needs room for "
            f"{config.keep_last + 1} of them",
        ]
    )
