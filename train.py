"""Train one variant.

    python train.py config/demo_cpu.py                             one process, CPU or GPU
    torchrun --nproc_per_node=4 train.py config/ddl_dv4_small.py   four GPUs, the same optimisation
    python train.py config/ddl_dv4_small.py --ddl_beta_init=0.5 --out_dir=runs/beta05
    python train.py [CONFIG.py] --help                             every key

The defaults are the paper's recipe (Deep Delta Learning, arXiv 2601.00417); a config file overrides
them, the command line overrides the file. The run folder receives metrics.jsonl and checkpoints;
`research/report.py curves` draws it and `sample.py` reads what it learned.
"""

import dataclasses
import functools
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split
import numpy as np
import torch

from data.loader import TrainBatches, ValidationBatches, has_targets, prefetched
from data.shards import DamagedShard, folder_of, open_corpus, read_json, vocab_size_of
from data.tokenizer import describe, size_of
from data.windows import Windows
from model import STEMS, build, every_config, faults_of, kernels, model_class, weights
from model.keys import Key, check_ranges, keys_of, refuse_idle, values_before
from training import checkpoint, distributed, memory, metrics, optimizer, start, stopping
from training.provenance import code_digest, commit, machine
from training.residual_statistics import residual_statistics
from training.validation import evaluate, save_losses

LATER = Key(changeable=True)  # may have another value when a run goes on
FROM_0, FROM_1, SHARE = Key(low=0), Key(low=1), Key(low=0, below=1)
LATER_0, LATER_1 = Key(low=0, changeable=True), Key(low=1, changeable=True)
MUON = ("optimizer", "muon".__eq__)  # what a key counts with; typed without it, it is refused
MEMORY = "give a smaller --micro_batch_size, or --activation_checkpointing=True, and --resume=auto"


@dataclass
class TrainConfig:
    """Keys of the run."""

    model: Annotated[str, "variant: a file of model/ without .py"] = "gpt-mha-rope"
    dataset: Annotated[str, "token shards: a folder, or its name in data/", LATER] = "fineweb_edu"
    out_dir: Annotated[str | None, "run folder; None: runs/<name of the config file>", LATER] = None
    resume: Annotated[str | None, "auto: start or continue out_dir; or a checkpoint", LATER] = None
    init_from: Annotated[str | None, "run, exported or released folder: its weights"] = None
    dry_run: Annotated[bool, "check everything, print the run's size, and exit", LATER] = False
    seed: Annotated[int, "of initialisation and data order", Key(low=0, high=2**63 - 1)] = 0
    device: Annotated[Literal["auto", "cuda", "cpu"], "auto: the GPU if there is one", LATER] = (
        "auto"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], "compute type; auto: bfloat16 on a GPU"
    ] = "auto"
    compile: Annotated[bool, "torch.compile; on a CPU it needs a C++ compiler", LATER] = True
    kernels: Annotated[Literal["auto", "on", "off"], "fused steps; auto: on a GPU", LATER] = "auto"
    state_interval: Annotated[int, "kernels: sublayers between kept states", LATER_1] = 2
    engine: Annotated[Literal["ddp", "fsdp"], "whole copies, or parts of weights", LATER] = "ddp"
    activation_checkpointing: Annotated[bool, "compute blocks twice: less memory", LATER] = False
    deterministic: Annotated[bool, "on a GPU: the same bits every time", LATER] = False

    max_steps: Annotated[int, "optimizer steps", LATER_1] = 100_000
    max_seconds: Annotated[
        float | None, "save and exit (code 75) within this time", Key(above=0, changeable=True)
    ] = None
    global_batch_size: Annotated[int, "sequences per step, over all processes", FROM_1] = 480
    micro_batch_size: Annotated[int, "most sequences of a process at once", LATER_1] = 20
    optimizer: Annotated[Literal["adamw", "muon"], "muon: on the sublayers' matrices"] = "adamw"
    learning_rate: Annotated[float, "peak learning rate, of AdamW", FROM_0] = 1e-3
    muon_learning_rate: Annotated[
        float | None, "Muon's; None: learning_rate", Key(low=0, counts_with=MUON)
    ] = None
    muon_dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        "type of Muon's iteration; None: the compute type",
        Key(before="bfloat16", counts_with=MUON),
    ] = None
    embedding_learning_rate: Annotated[
        float | None, "the embedding's, which is AdamW's; None: learning_rate", FROM_0
    ] = None
    min_lr: Annotated[float | None, "the last step's; None: learning_rate / 20", FROM_0] = None
    schedule: Annotated[Literal["cosine", "wsd"], "wsd: stay, at the end fall linearly"] = "cosine"
    warmup_steps: Annotated[int, "steps of linear warmup", FROM_0] = 2000
    # Before it was a share of the run it was 10,000, which a run begun then keeps.
    decay_steps: Annotated[
        int | None,
        "wsd: steps of the fall to min_lr; None: a fifth of the run",
        Key(low=0, changeable=True, before=10_000, counts_with=("schedule", "wsd".__eq__)),
    ] = None
    weight_decay: Annotated[float, "on matrices, the embedding and convolutions", FROM_0] = 0.1
    weight_decay_rate: Annotated[
        float | None, "peak rate that weight_decay is multiplied by; None: a weight's own", FROM_0
    ] = None
    beta1: Annotated[float, "AdamW: decay of the mean gradient", SHARE] = 0.9
    beta2: Annotated[float, "AdamW: decay of the mean squared gradient", SHARE] = 0.95
    grad_clip: Annotated[float, "largest norm of the whole gradient; 0: any", FROM_0] = 1.0
    skip_nonfinite: Annotated[int, "steps with non-finite numbers to skip", LATER_0] = 0

    eval_interval: Annotated[int, "steps between evaluations", LATER_1] = 1000
    eval_batches: Annotated[int, "global batches per evaluation", FROM_1] = 8
    eval_full: Annotated[bool, "at the end evaluate every validation token", LATER] = True
    eval_part: Annotated[
        Literal["all", "first", "second"], "of the validation windows: all, or one half"
    ] = "all"
    log_interval: Annotated[int, "steps between progress lines", LATER_1] = 10
    checkpoint_interval: Annotated[int, "steps between checkpoints", LATER_1] = 1000
    keep_last: Annotated[int, "newest checkpoints kept", LATER_1] = 2
    keep_every: Annotated[int, "also keep multiples of this step; 0: none", LATER_0] = 0
    statistics_interval: Annotated[int, "steps between stream statistics; 0: none", LATER_0] = 0
    wandb_log: Annotated[bool, "log to Weights & Biases as well", LATER] = False
    wandb_project: Annotated[str, "its project", LATER] = "deep-delta-learning"
    wandb_run_name: Annotated[str | None, "its run name; None: wandb's choice", LATER] = None

    def __post_init__(self):
        check_ranges(self)

    @property
    def share(self) -> int:
        """Sequences of a step that this process has."""
        return self.global_batch_size // distributed.world_size()

    @property
    def rows(self) -> int:
        """Sequences per forward pass."""
        return min(self.micro_batch_size, self.share)


# ---- what a user gives ----


def every_key() -> dict[str, configurator.Knob]:
    """The keys of the run and of all variants whose files can be read."""
    return configurator.knobs(TrainConfig, *every_config())


def known_keys(from_file: dict, options: dict) -> dict[str, configurator.Knob]:
    """The keys of the run and of its variant, or, where one is none of theirs, of all variants.

    A sweep has several variants, with commas between. Only the files of the named ones are read.
    """
    stems = str(options.get("model", from_file.get("model", TrainConfig.model))).split(",")
    known = configurator.knobs(TrainConfig, *(model_class(s).Config for s in stems if s in STEMS))
    return known if known.keys() >= from_file.keys() | options.keys() else every_key()


def configure(argv: list[str], note=print):
    """(TrainConfig, the stem's model Config) from a config file and `--key=value`.

    note: takes lines that a user may want to read. ValueError: any mistake in the keys.
    """
    files, options = configurator.split_arguments(argv)
    if len(files) > 1:
        raise ValueError(f"one config file, then --key=value; got {' '.join(files)}")
    if "help" in options:
        print(configurator.help_text(f"{__doc__}\nKeys and defaults:", every_key()))
        sys.exit(0)
    from_file = configurator.read_file(files[0]) if files else {}
    known = known_keys(from_file, options)
    configurator.refuse_unknown(from_file, known)
    configurator.refuse_unknown(options, known, dashes="--")
    if options.get("resume") == "True":  # a bare --resume
        options["resume"] = "auto"

    run_keys = configurator.knobs(TrainConfig)
    given = configurator.given(from_file, options, run_keys)
    default = None if given.get("init_from") else TrainConfig.model  # that folder decides
    name = Path(files[0]).stem if files else given.get("model", default)
    given["out_dir"] = given.get("out_dir") or (f"runs/{name}" if name else None)
    saved = start.saved_state(given.get("resume"), given["out_dir"])  # of a run that goes on
    decided = {}  # by the folder init_from, or by the run that goes on from it
    if given.get("init_from") is not None and saved:
        decided = {**saved["model_config"], "model": saved["model"]}
    elif given.get("init_from") is not None:
        decided = start.model_of(given["init_from"], given.get("model"))
    stem = given.get("model", decided.get("model", TrainConfig.model))
    given["out_dir"] = given["out_dir"] or f"runs/{stem}"

    # A file may carry keys of another variant, so that --model=... can be set over it; what is
    # typed must count.
    config_class = model_class(stem).Config
    model_keys = configurator.knobs(config_class)
    for key in sorted(run_keys.keys() & model_keys.keys()):
        raise ValueError(f"model/{stem}.py: its key {key} is one of the run: give it another name")
    for key in sorted(options.keys() - run_keys.keys() - model_keys.keys()):
        raise ValueError(f"--{key} is not a key of {stem}: leave it out, or choose another --model")
    elsewhere = sorted(from_file.keys() - run_keys.keys() - model_keys.keys())
    if elsewhere and distributed.rank() == 0:
        note(f"note: {', '.join(elsewhere)} of {files[0]} do not concern {stem}")
    given |= configurator.given(from_file, options, model_keys)
    given = of_corpus(given, saved) | start.merged(given, decided, keys_of(config_class))
    if saved:  # keys whose default has changed since: the run keeps its own
        old = {**saved["run_config"], **saved["model_config"]}
        before = values_before(TrainConfig, config_class)
        given = {key: old.get(key, value) for key, value in before.items()} | given

    config = TrainConfig(**{key: value for key, value in given.items() if key in run_keys})
    check_run(config, saved)
    model_config = config_class(**{k: value for k, value in given.items() if k not in run_keys})
    keys = {**keys_of(TrainConfig), **keys_of(config_class)}
    refuse_idle(options, {**vars(config), **vars(model_config)}, keys)
    return config, model_config


def of_corpus(given: dict, saved: dict) -> dict:
    """What the data decides where nothing is said, as far as it is known.

    vocab_size: that of the run which goes on, or the corpus's, padded for the GPU. block_size: that
    of a corpus whose documents are windows. ValueError: the corpus is damaged.
    """
    dataset = given.get("dataset", TrainConfig.dataset)
    documents = Windows.of(read_json(folder_of(dataset) / "meta.json"))
    result = {"block_size": documents.length} if documents else {}
    if saved:
        stem = model_class(saved["model"])
        size = saved["model_config"].get("vocab_size", stem.Config.vocab_size)
        return result | {"vocab_size": size}
    size = vocab_size_of(dataset)
    return result | ({"vocab_size": -(-size // 64) * 64} if size else {})


def check_run(c: TrainConfig, saved: dict | None = None) -> None:
    """Contradictions between run keys. ValueError: names the key, the value and the fix.

    saved: state.json of a run that goes on.
    """
    if c.min_lr is not None and c.min_lr > c.learning_rate:
        most = f"learning_rate={c.learning_rate}"
        raise ValueError(f"min_lr={c.min_lr}: give a number from 0 to {most}")
    for key in ("learning_rate", *optimizer.OWN_RATES.values()):
        if c.weight_decay_rate is not None and getattr(c, key) == 0:
            what = f"weight_decay_rate={c.weight_decay_rate} with {key}=0"
            fix = f"leave weight_decay_rate out, or give a {key} above 0"
            raise ValueError(f"{what}: weights at a rate of 0 do not decay: {fix}")
    if c.kernels == "off" and c.state_interval != TrainConfig.state_interval:
        what = f"state_interval={c.state_interval} has no effect with kernels=off"
        raise ValueError(f"{what}: leave one of them out")
    if c.engine == "fsdp" and c.optimizer == "muon":
        fix = "Muon needs whole matrices: give engine=ddp, or adamw"
        raise ValueError(f"optimizer=muon with engine=fsdp: {fix}")
    world, batch = distributed.world_size(), f"global_batch_size={c.global_batch_size}"
    if c.global_batch_size % world:
        raise ValueError(f"{batch} does not divide over {world} processes")
    if c.share % c.rows:
        fits = max(size for size in range(1, c.rows) if c.share % size == 0)
        whole = f"the {c.share} sequences per process ({batch} over {world})"
        what = f"micro_batch_size={c.rows} does not divide {whole}"
        raise ValueError(f"{what}: try --micro_batch_size={fits}")
    # A longer fall would begin with a cliff, far below the peak. A run that began so goes on so.
    most, before = max(c.max_steps - c.warmup_steps, 0), saved["run_config"] if saved else {}
    kept = all(getattr(c, key) == before.get(key) for key in ("decay_steps", "max_steps"))
    if c.schedule == "wsd" and (c.decay_steps or 0) > most and not kept:
        what = f"max_steps={c.max_steps} has {most} steps after warmup_steps={c.warmup_steps}"
        fix = f"give 0 to {most}, or leave it out for a fifth of the run"
        raise ValueError(f"decay_steps={c.decay_steps}, but {what}: {fix}")


def open_data(config: TrainConfig, model_config):
    """(corpus, training batches, validation batches).

    ValueError: missing, damaged, too short, or of more tokens than the model knows.
    """
    corpus = open_corpus(config.dataset)
    known, length = corpus.meta["vocab_size"], model_config.block_size
    if known > model_config.vocab_size:
        what = f"{corpus.path} has {known} tokens"
        raise ValueError(f"vocab_size={model_config.vocab_size}, but {what}: give {known}")
    if known != (size := size_of(describe(corpus.path))):
        what = f"meta.json has vocab_size {known}, its tokenizer {size}"
        raise ValueError(f"{corpus.path}: {what}: prepare it again")
    documents, batch_size = Windows.of(corpus.meta), config.global_batch_size
    batches = TrainBatches(corpus.train, length, batch_size, config.seed, known, documents)
    of_length = f"sequences of block_size={length}"
    if batches.windows < batch_size:
        what = f"the training split of {corpus.path} has {batches.windows} {of_length}"
        fix = "give a smaller batch, or more text"
        raise ValueError(f"global_batch_size={batch_size}, but {what}: {fix}")
    validation = ValidationBatches(corpus.val, length, known, documents)
    if config.eval_part != "all" and validation.windows < 2:
        what = f"the validation split of {corpus.path} has no two {of_length}"
        fix = "give a shorter one, or eval_part=all"
        raise ValueError(f"eval_part={config.eval_part}: {what}; {fix}")
    if documents and documents.labels:
        spread = validation.spread(config.eval_batches * config.global_batch_size, config.eval_part)
        splits = {"training": (batches, range(batches.windows)), "validation": (validation, spread)}
        for split, (read, windows) in splits.items():
            if not has_targets(read.tokens, documents, windows):
                what = f"no label in the {len(windows)} documents that are read of it"
                raise ValueError(f"the {split} split of {corpus.path} has {what}: prepare it again")
    return corpus, batches, validation


# ---- parts of a run ----


def make_model(config: TrainConfig, model_config, begin: Path | None, corpus: Path, device):
    """The model with the weights that the run begins with, and lines to say of it."""
    distributed.be_deterministic(config.deterministic)
    torch.manual_seed(config.seed)
    model = build(config.model, **dataclasses.asdict(model_config))
    with faults_of(config.model):  # the first time that a model of a user's runs
        model.state_bytes_per_token(torch.float32)  # asks each read and write for what it returns
        without_gradient = optimizer.without_gradient(model)
    model.activation_checkpointing = config.activation_checkpointing
    not_fused = kernels.use(model, config.kernels, device, config.state_interval)
    if begin:
        weights.fill(model, begin)
        start.refuse_other_scales(model, config, begin)
    elif config.init_from is not None:
        start.load(model, config.init_from, corpus)
    notes = model_config.notes()
    if config.kernels != "off" and device.type == "cuda" and not_fused:
        notes = [f"no fused kernels: {not_fused}", *notes]
    if without_gradient:
        names = ", ".join(without_gradient)
        notes = [f"nothing of the loss depends on {names}: it will not be trained", *notes]
    if config.warmup_steps > config.max_steps:
        notes = [*notes, f"warmup_steps={config.warmup_steps} is longer than the run"]
    return model, without_gradient, notes


def micro_batches(config: TrainConfig, batches: TrainBatches, first_step: int, world):
    """(ids, targets) of every micro-batch of this process from `first_step` (from 1) to the last.

    They are made in advance. Where those of a step have unequal numbers of targets, also what its
    loss counts, a scalar (`TrainBatches.shares`).
    """
    rows = config.rows
    firsts = range(world.rank * rows, config.global_batch_size, world.world_size * rows)
    steps = range(first_step - 1, config.max_steps)
    shares_of = functools.lru_cache(1)(lambda step: batches.shares(step, rows))

    def made(place):
        step, first = place
        shares = shares_of(step)
        return batches.get(step, first, rows) + (() if shares is None else (shares[first // rows],))

    return prefetched(made, ((step, first) for step in steps for first in firsts), world.device)


def diagnose(model, optimizers, batches, world, step: int, loss: float, grad_norm: float) -> dict:
    """Of a step that is not finite: its numbers, the parameters with non-finite gradients by
    optimizer group, and its batch; every process must call it.

    `sequences` are the numbers of the batch's first and last sequence in the run, `starts` the
    positions of the sequences' first tokens in the training split.
    """
    bad, size = set(distributed.non_finite_gradients(model, world)), batches.global_batch_size
    numbers = np.arange((step - 1) * size, step * size)
    groups = []
    for group in [group for each in optimizers for group in each.param_groups]:
        facts = {"weight_decay": group["weight_decay"], "lr": group["lr"]}
        facts["parameters"] = [name for name in group["names"] if name in bad]
        groups.append(facts | {"of": len(group["names"])})
    result = {"step": step, "loss": str(loss), "grad_norm": str(grad_norm), "groups": groups}
    starts = batches.starts(numbers).tolist()
    return {**result, "sequences": numbers[[0, -1]].tolist(), "starts": starts}


def write_diagnosis(folder: Path, diagnosis: dict, saved: bool) -> str:
    """One line; the whole diagnosis goes to a file beside the state before the step, if `saved`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "diagnosis.json").write_text(json.dumps(diagnosis, indent=1) + "\n")
        kept = f"{folder} has {'the state before the step and ' if saved else ''}diagnosis.json"
    except OSError as error:
        kept = f"{folder} cannot be written ({error})"
    names = [name for group in diagnosis["groups"] for name in group["parameters"]]
    where = "gradients are finite"
    if names:
        where = f"the gradients of {len(names)} parameters are not finite, first {names[0]}"
    what = "step {step}: loss {loss}, gradient norm {grad_norm}".format(**diagnosis)
    batch = "sequences {} to {} of the run".format(*diagnosis["sequences"])
    fix = "try a lower learning_rate or a longer warmup_steps"
    return f"{what}: stopped before the optimizer step; {where}; batch: {batch}; {kept}; {fix}"


def main():
    # ---- all that a user can get wrong is checked before anything is written ----
    with configurator.one_line_errors():
        config, model_config = configure(sys.argv[1:])
        settings = {**dataclasses.asdict(config), **dataclasses.asdict(model_config)}
        device, out = distributed.pick_device(config.device), Path(config.out_dir)
        if config.compile and not distributed.can_compile(device):
            needed = "a C++ compiler and Python's headers: install them, or --compile=False"
            raise ValueError(f"compile=True needs {needed}")
        if config.wandb_log:
            configurator.optional("wandb", "wandb_log=True")
        memory.refuse_too_large(config, model_config, device)
        # A run that goes on there writes and removes what is looked at from here on.
        held = distributed.rank() == 0 and not config.dry_run and (out / "lock").exists()
        lock = start.lock(out) if held else None
        corpus, train_batches, val_batches = open_data(config, model_config)
        tokenizer_json = describe(corpus.path)  # for every checkpoint, wherever the corpus is then
        begin = start.find(config, settings, corpus.identity)
        progress = start.progress_at(begin, out)
        todo = config.max_steps - progress["step"] + (not progress["evaluated"])
        if todo <= 0:
            if distributed.rank() == 0:
                of = f"{progress['step']} of max_steps={config.max_steps}"
                print(f"{begin} has its {of} steps: nothing to train")
                if not config.dry_run and out.is_dir():
                    stopping.write_status(out, progress["step"], config.max_steps, "finished")
            return
        if begin and distributed.rank() == 0 and (note := start.rate_jump(begin, config)):
            print(note)
        made = make_model(config, model_config, begin, corpus.path, device)
        model, without_gradient, notes = made
        if config.dry_run:
            print(memory.size_of_run(config, model, train_batches.windows, device))
            return

    # ---- the processes, and the model on their devices ----
    world, stop = distributed.start(device), stopping.Stop(config.max_seconds)
    sys.stdout, sys.stderr = stopping.Tolerant(sys.stdout), stopping.Tolerant(sys.stderr)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, but for linear_fp32
    bf16 = distributed.computes_in_bfloat16(config.dtype, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    log = None  # the main process's
    with configurator.one_line_errors():
        facts = {"the configuration": settings, "the code": code_digest()}
        facts |= {"the checkpoint": str(begin), "the data": corpus.identity}
        facts["torch"] = torch.__version__
        if world.world_size > 1:
            sums = [parameter.double().sum().item() for parameter in model.parameters()]
            facts["the weights they begin with"] = sums
        distributed.refuse_disagreement(world, facts)
        how = config.engine, config.compile, world, bool(without_gradient)
        train_model, eval_model = distributed.parallelise(model, *how)
        in_bf16 = bf16 if config.muon_dtype is None else config.muon_dtype == "bfloat16"
        muon_dtype = torch.bfloat16 if in_bf16 else torch.float32
        optimizers = optimizer.build_optimizers(model, config, muon_dtype)
        if begin:
            state = checkpoint.load_tensors(begin / "optimizer.safetensors")
            optimizer.load_named_state(optimizers, state, without_gradient)
        if world.is_main:
            lock = lock or start.lock(out)
            stopping.write_status(out, progress["step"], config.max_steps, ended=None)
            checkpoint.set_aside(out, begin)
            commit()  # of the code that runs, whatever becomes of the files: it is remembered
            log = metrics.RunLog(out, config, settings, progress, model, world)
            where = f"{'bfloat16' if bf16 else 'float32'} on {world.world_size} x {device.type}"
            parameters = f"{model.num_parameters():,} parameters"
            print(f"{config.model}: {parameters}, {where}; run folder {out}")
            left_out = f"{train_batches.skipped:,} of {len(train_batches.tokens):,} tokens"
            epoch = f"{train_batches.windows:,} sequences an epoch"
            print(f"{epoch}; each leaves out {left_out}, not always the same")
            for note in notes:
                print(f"note: {note}")
            if config.compile:
                print("compiling: the first step takes up to a minute or two", flush=True)

    accumulation = config.share // config.rows
    # Where the device can leave out a step by itself, nobody waits before the optimizer.
    decided_on_device = config.optimizer == "adamw" and config.engine == "ddp"

    def gradients(batches) -> torch.Tensor:
        """Gradients of the next global batch, clipped. On the device, of all processes: the mean
        loss (nats per token), how many want to stop, and the gradient norm before clipping."""
        loss_sum = 0.0
        for micro in range(accumulation):
            ids, targets, *share = next(batches)
            # Gradients are averaged over processes once, with the last micro-batch.
            with distributed.synchronising(train_model, micro == accumulation - 1):
                with autocast:
                    _, loss = train_model(ids, targets)
                if share:  # without a target the loss is nan
                    loss = torch.where(share[0] > 0, loss, 0.0) * share[0]
                (loss / accumulation).backward()
            loss_sum += loss.detach()
        norm = distributed.clip_gradients(model, config.grad_clip)
        return distributed.summed(loss_sum, float(bool(stop.reason())), norm, world)

    def save(folder: Path) -> bool:
        """Whether the checkpoint was written; every process must call it."""
        begun = time.perf_counter()
        tensors = distributed.gathered(checkpoint.weights_of(model), world)
        moments = distributed.gathered(optimizer.named_state(optimizers), world)
        if not world.is_main:
            return True
        state = {"model": config.model, "model_config": dataclasses.asdict(model_config)}
        state |= {**progress, "run_config": dataclasses.asdict(config), "corpus": corpus.identity}
        scales = optimizer.lr_scales(model, config.optimizer == "muon")
        state |= {"commit": commit(), "lr_scales": scales}
        state["trained_on"] = {**machine(), "device": device.type, "processes": world.world_size}
        log.flush(to_disk=True)
        try:
            path = checkpoint.save(folder, tensors, moments, state, tokenizer_json)
        except OSError as error:
            what = f"warning: step {progress['step']}: no checkpoint ({error})"
            print(f"{what}; the one before is kept", file=sys.stderr)
            return False
        print(f"saved {path}", flush=True)
        checkpoint.remove_old(out, config.keep_last, config.keep_every)
        stop.save_seconds = time.perf_counter() - begun
        return True

    # ---- warm-up ----
    # After its first backward pass DDP lays out its buckets anew, in the order in which gradients
    # arrived, and where a gradient lies decides in which order three or more processes sum it.
    # torch.compile cuts the graph in the first pass, if that is one of DDP's. With a step that
    # counts for nothing every step of a run, before and after a restart, finds the same.
    if world.world_size > 1 and config.engine == "ddp":
        begun = time.perf_counter()
        with configurator.one_line_errors(DamagedShard):
            gradients(micro_batches(config, train_batches, 1, world))
        model.zero_grad(set_to_none=True)
        progress["seconds"] += time.perf_counter() - begun

    # ---- the loop ----
    batches = micro_batches(config, train_batches, progress["step"] + 1, world)
    saved = stopped = failure = False
    # A run that was stopped within an evaluation begins with that.
    for step in range(progress["step"] + progress["evaluated"], config.max_steps + 1):
        final = step == config.max_steps
        if step > progress["step"]:
            begun = time.perf_counter()
            distributed.seed_step(config.seed, step, world)
            rates = optimizer.set_rates(optimizers, step - 1, config)
            with configurator.one_line_errors(DamagedShard):
                numbers = gradients(batches)
            read = distributed.read_later(numbers)
            if decided_on_device:
                optimizer.step_where(numbers.isfinite().all(), optimizers)
            loss_sum, wishes, grad_norm = read()
            loss, stopped = loss_sum / accumulation / world.world_size, bool(wishes)
            finite = math.isfinite(loss) and math.isfinite(grad_norm)
            if not finite and decided_on_device:
                optimizer.forget_unstepped(optimizers)
            if not finite and progress["skipped"] == config.skip_nonfinite:
                where = model, optimizers, train_batches, world
                diagnosis = diagnose(*where, step, loss, grad_norm)
                kept = save(out / "nonfinite")  # the state before the step
                failure = "-"
                if world.is_main:
                    failure = write_diagnosis(out / "nonfinite", diagnosis, kept)
                break
            for each in optimizers:
                if finite and not decided_on_device:
                    each.step()
                each.zero_grad(set_to_none=True)
            seconds = time.perf_counter() - begun
            progress |= {"step": step, "seconds": progress["seconds"] + seconds}
            progress["skipped"] += not finite
            stop.step_took(seconds)
            if log and finite:
                log.training_step(loss, grad_norm, rates)
            elif log:
                log.skipped_step(loss, grad_norm)
            if config.statistics_interval and step % config.statistics_interval == 0:
                first = list(range(min(4, val_batches.windows)))
                ids, _ = val_batches.get(first, len(first))
                statistics = residual_statistics(model, ids.to(device), autocast)
                if log:
                    log.write(residual=statistics)
        if final or step % config.eval_interval == 0:
            whole = final and config.eval_full
            count = None if whole else config.eval_batches * config.global_batch_size
            windows = val_batches.spread(count, config.eval_part)
            what = eval_model, val_batches, windows, config.rows, world, autocast
            with configurator.one_line_errors(DamagedShard):
                scores = evaluate(*what, stop.reason, each=whole)
            progress["evaluated"] = scores is not None  # else it was stopped, and is to be redone
            stopped = stopped or scores is None
            if log and scores:
                if (losses := scores.pop("losses", None)) is not None:
                    save_losses(out / "losses.npz", step, windows, losses)
                share = len(windows), val_batches.windows
                log.evaluation(scores, corpus.bytes_per_token("val"), *share)
        if final or stopped or step % config.checkpoint_interval == 0:
            saved = save(out)
        if stopped and not (final and progress["evaluated"]):
            break

    # ---- the end ----
    if log:
        log.close()
        lock.close()
    distributed.stop(world)
    done = progress["step"]
    complete = done == config.max_steps and progress["evaluated"]
    if not failure and not saved:
        failure = f"step {done} is not saved: free disk space and start again with --resume=auto"
    reason = failure or (not complete and (stop.reason() or "another process was told to")) or ""
    if world.is_main:
        ended = "failed" if failure else "finished" if complete else "stopped"
        stopping.write_status(out, done, config.max_steps, ended, reason)
    if failure:
        if world.is_main:
            configurator.end(failure, 1)
        sys.exit(1)
    if not complete:
        if world.is_main:
            print(f"stopped ({reason}) after step {done}; --resume=auto goes on")
        # torchrun would take any other code for a fault, and start the run again at once.
        sys.exit(0 if "TORCHELASTIC_RUN_ID" in os.environ else stopping.EXIT_CODE)


if __name__ == "__main__":
    with configurator.one_line_errors(MemoryError, memory=MEMORY):
        main()
