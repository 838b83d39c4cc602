"""The dry run: what a run needs, and what is missing to start it, without training."""

from pathlib import Path

from data.shards import MissingCorpus
from model import cost, kernels, weights
from training import memory
from training.batches import open_data
from training.settings import Settings
from training.setup import build_model, check_corpus, check_machine, describe_model, load_weights
from utils import machine, processes


def print_dry_run(settings: Settings) -> None:
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
    if data is not None and settings.resumed is not None:
        check_corpus(settings, data)
    # the run may be too large for this machine; the meta device has no memory
    model = build_model(config, settings.model_config, device, on_meta=config.init_from is None)
    kernels.use(model, config.kernels, device, config.state_checkpoint_interval)
    if settings.resumed is not None:
        headers = weights.read_headers(settings.resumed)
        weights.check_tensors(headers, model, f"{settings.resumed} does not fit the model")
    elif data is not None:
        load_weights(model, settings, data.corpus.path)
    if machine.rank() != 0:
        return
    sequences_per_epoch = None if data is None else data.train.num_sequences
    print(memory.describe_run(config, model, sequences_per_epoch, device))
    unused_parameters = list(cost.count_cost(model).unused_parameters)
    for note in [*settings.notes, *describe_model(model, unused_parameters)]:
        print(f"note: {note}")
    out_dir = Path(config.out_dir)
    if settings.resumed is not None:
        print(f"this run would resume from {settings.resumed}")
    elif out_dir.is_dir() and any(out_dir.iterdir()):
        print(f"note: {out_dir} is not empty: to train, resume that run with --resume=auto")
    if missing_data:
        print(missing_data)
