"""The dry run: what a run needs, and what is missing to start it, without training."""

from pathlib import Path

from data.shards import MissingCorpus
from model import kernels
from training import memory, resume
from training.batches import open_data
from training.settings import Settings
from training.setup import (
    build_model,
    check_machine,
    describe_complete,
    describe_pitfalls,
    load_initial_weights,
)
from utils import machine, processes


def print_dry_run(resolved: Settings, resume_checkpoint: Path | None) -> None:
    """Print the size of a run, and what is missing to start it.

    Raises:
        ValueError: as `setup.plan_run` does
    """
    config = resolved.config
    device = processes.pick_device(config.device)
    check_machine(config, device)
    data = None
    missing_data = None
    try:
        data = open_data(config, resolved.model_config, resume_checkpoint)
    except MissingCorpus as error:
        missing_data = str(error)
    if resume_checkpoint is not None and data is not None:
        saved_corpus = resolved.saved_state["corpus"]
        resume.check_corpus(saved_corpus, data.corpus.identity, config.dataset, resume_checkpoint)
    state = resume.load_state(resolved.saved_state, resume_checkpoint, config)
    # the run may be too large for this machine; the meta device has no memory
    on_meta = config.init_from is None
    model = build_model(config, resolved.model_config, device, on_meta)
    reason_not_fused = kernels.use(model, config.kernels, device, config.state_checkpoint_interval)
    corpus_path = None if data is None else data.corpus.path
    load_initial_weights(model, config, resume_checkpoint, corpus_path)
    if machine.rank() != 0:
        return

    sequences_per_epoch = None if data is None else data.train.num_sequences
    print(memory.describe_run(config, model, sequences_per_epoch, device))
    pitfalls = describe_pitfalls(config, model, device, reason_not_fused)
    for note in [*pitfalls, *resume.describe_changed_settings(resolved.saved_state, config)]:
        print(f"note: {note}")
    out_dir = Path(config.out_dir)
    if state.is_complete(config.max_steps):
        print(describe_complete(config, state, resume_checkpoint))
    elif resume_checkpoint is not None:
        print(f"this run would resume from {resume_checkpoint}")
    elif out_dir.is_dir() and any(out_dir.iterdir()):
        print(
            f"note: {out_dir} is not empty: to train, resume that run with --resume=auto, or give "
            "another --out_dir"
        )
    if missing_data is not None:
        print(f"before training: {missing_data}")
