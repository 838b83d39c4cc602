"""Train one variant.

    python train.py config/demo_cpu.py                                    one process, CPU or GPU
    torchrun --nproc_per_node=4 train.py config/ddl_dv4_small.py          four GPUs, the same optimisation
    python train.py config/ddl_dv4_small.py --ddl_beta_init=0.5 --out_dir=runs/beta05
    python train.py [CONFIG.py] --help                                    every key

The defaults are the paper's recipe (Deep Delta Learning, arXiv 2601.00417); a config file overrides them, the command
line overrides the file. The run folder receives metrics.jsonl and checkpoints; `research/report.py curves` draws it and
`sample.py` reads what it learned.
"""

import dataclasses
import functools
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

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
from training import checkpoint, distributed, memory, metrics, optimizer, outcome, start, stopping
from training.provenance import code_digest, commit, machine
from training.residual_statistics import residual_statistics
from training.validation import evaluate, save_losses

LATER = Key(changeable=True)  # may have another value when a run goes on
FROM_0, FROM_1, SHARE = Key(low=0), Key(low=1), Key(low=0, below=1)
LATER_FROM_0, LATER_FROM_1 = Key(low=0, changeable=True), Key(low=1, changeable=True)
LATER_ABOVE_0 = Key(above=0, changeable=True)


@dataclass
class TrainConfig:
    """Keys of the run."""

    model: Annotated[str, "variant: a file of model/ without .py"] = "gpt-mha-rope"
    dataset: Annotated[str, "folder of token shards: a name under data/, or a path", LATER] = "fineweb_edu"
    out_dir: Annotated[str | None, "run folder; None: runs/<name of the config file>", LATER] = None
    resume: Annotated[str | None, "auto: start or continue out_dir; a path: go on from there", LATER] = None
    init_from: Annotated[str | None, "folder whose weights training starts from: a run, exported or released"] = None
    dry_run: Annotated[bool, "check everything, print the size of the run, and exit", LATER] = False
    seed: Annotated[int, "seed of initialisation and data order", Key(low=0, high=2**63 - 1)] = 0
    device: Annotated[Literal["auto", "cuda", "cpu"], "auto: the GPU where there is one", LATER] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], "compute type; weights stay float32; auto: bfloat16 on a GPU"
    ] = "auto"
    compile: Annotated[bool, "torch.compile the model; on a CPU it needs a C++ compiler", LATER] = True
    kernels: Annotated[Literal["auto", "on", "off"], "fused residual steps; auto: on a GPU", LATER] = "auto"
    state_interval: Annotated[int, "kernels: sublayers between kept states; 4 saves memory", LATER_FROM_1] = 2
    engine: Annotated[Literal["ddp", "fsdp"], "processes have copies, or parts of parameters", LATER] = "ddp"
    activation_checkpointing: Annotated[bool, "keep states between blocks; compute blocks again", LATER] = False
    deterministic: Annotated[bool, "on a GPU: operations that give the same bits every time", LATER] = False

    max_steps: Annotated[int, "optimizer steps", LATER_FROM_1] = 100_000
    max_seconds: Annotated[float | None, "save and exit (code 75) within this time", LATER_ABOVE_0] = None
    global_batch_size: Annotated[int, "sequences per step, over all processes", FROM_1] = 480
    micro_batch_size: Annotated[int, "most sequences of a process at once; smaller saves memory", LATER_FROM_1] = 20
    optimizer: Annotated[Literal["adamw", "muon"], "muon: Muon on the sublayers' matrices, AdamW on the rest"] = "adamw"
    learning_rate: Annotated[float, "peak learning rate, of AdamW", FROM_0] = 1e-3
    muon_learning_rate: Annotated[
        float | None, "Muon's; None: learning_rate", Key(low=0, counts_with=("optimizer", "muon".__eq__))
    ] = None
    muon_dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        "type of Muon's iteration; None: the compute type",
        Key(before="bfloat16", counts_with=("optimizer", "muon".__eq__)),
    ] = None
    embedding_learning_rate: Annotated[
        float | None, "the embedding's, which is AdamW's; None: learning_rate", FROM_0
    ] = None
    min_lr: Annotated[float | None, "learning rate at the last step; None: learning_rate / 20", FROM_0] = None
    schedule: Annotated[Literal["cosine", "wsd"], "after warmup; wsd: stay, at the end fall linearly"] = "cosine"
    warmup_steps: Annotated[int, "steps of linear warmup", FROM_0] = 2000
    # Before it was a share of the run it was 10,000, which a run begun then keeps.
    decay_steps: Annotated[
        int | None,
        "wsd: steps of the fall to min_lr; None: a fifth of the run",
        Key(low=0, changeable=True, before=10_000, counts_with=("schedule", "wsd".__eq__)),
    ] = None
    weight_decay: Annotated[float, "on matrices, the embedding and convolutions", FROM_0] = 0.1
    weight_decay_rate: Annotated[
        float | None, "peak rate that weight_decay is multiplied by; None: each weight's own", FROM_0
    ] = None
    beta1: Annotated[float, "AdamW: decay of the mean gradient", SHARE] = 0.9
    beta2: Annotated[float, "AdamW: decay of the mean squared gradient", SHARE] = 0.95
    grad_clip: Annotated[float, "largest norm of the whole gradient; 0: no clipping", FROM_0] = 1.0
    skip_nonfinite: Annotated[int, "steps with a non-finite loss or gradient to skip", LATER_FROM_0] = 0

    eval_interval: Annotated[int, "steps between evaluations", LATER_FROM_1] = 1000
    eval_batches: Annotated[int, "global batches per evaluation, spread over the validation split", FROM_1] = 8
    eval_full: Annotated[bool, "evaluate every validation token after the last step", LATER] = True
    eval_part: Annotated[
        Literal["all", "first", "second"],
        "validation windows: all, or one half, so that the other may choose a setting",
    ] = "all"
    log_interval: Annotated[int, "steps between progress lines; metrics.jsonl has every step", LATER_FROM_1] = 10
    checkpoint_interval: Annotated[int, "steps between checkpoints; the last step has one", LATER_FROM_1] = 1000
    keep_last: Annotated[int, "newest checkpoints kept", LATER_FROM_1] = 2
    keep_every: Annotated[int, "also keep those whose step is a multiple of this; 0: none", LATER_FROM_0] = 0
    statistics_interval: Annotated[int, "steps between statistics of the stream; 0: none", LATER_FROM_0] = 0
    wandb_log: Annotated[bool, "log to Weights & Biases as well", LATER] = False
    wandb_project: Annotated[str, "its project", LATER] = "deep-delta-learning"
    wandb_run_name: Annotated[str | None, "its run name; None: wandb's choice", LATER] = None

    def __post_init__(self):
        check_ranges(self)

    @property
    def rows(self) -> int:
        """Sequences per forward pass: micro_batch_size, or a process's whole share of the batch where that is less."""
        return min(self.micro_batch_size, self.global_batch_size // distributed.world_size())


def every_key() -> dict[str, configurator.Knob]:
    """The keys of the run and of all variants whose files can be read."""
    return configurator.knobs(TrainConfig, *every_config())


def known_keys(from_file: dict, options: dict) -> dict[str, configurator.Knob]:
    """The keys of the run and of its variant, with commas between of several; of all, where one is none of theirs."""
    words = str(options.get("model", from_file.get("model", TrainConfig.model))).split(",")
    known = configurator.knobs(TrainConfig, *(model_class(word).Config for word in words if word in STEMS))
    return known if known.keys() >= from_file.keys() | options.keys() else every_key()


def configure(argv: list[str], note=print):
    """(TrainConfig, the stem's model Config) from a config file and `--key=value`. ValueError: any mistake in them.

    note: takes lines that a user may want to read.
    """
    files, options = configurator.split_arguments(argv)
    if len(files) > 1:
        raise ValueError(f"one config file, then --key=value; got {' '.join(files)}")
    from_file = configurator.read_file(files[0]) if files else {}
    run_keys = configurator.knobs(TrainConfig)
    if "help" in options:
        print(configurator.help_text(f"{__doc__}\nKeys and defaults:", every_key()))
        sys.exit(0)
    anywhere = known_keys(from_file, options)
    configurator.refuse_unknown(from_file, anywhere)
    configurator.refuse_unknown(options, anywhere, dashes="--")
    options.update({"resume": "auto"} if options.get("resume") == "True" else {})

    given = configurator.given(from_file, options, run_keys)
    default = TrainConfig.model if given.get("init_from") is None else None  # that folder decides the variant
    name = Path(files[0]).stem if files else given.get("model", default)
    given["out_dir"] = given.get("out_dir") or (f"runs/{name}" if name else None)
    saved = start.saved_state(given.get("resume"), given["out_dir"])
    decided = {}  # by the folder init_from, or by the run that goes on from it
    if given.get("init_from") is not None:
        decided = {"model": saved["model"], **saved["model_config"]} if saved else start.model_of(given["init_from"])
    stem = given.get("model", decided.get("model", TrainConfig.model))
    given["out_dir"] = given["out_dir"] or f"runs/{stem}"

    # A file may carry keys of another variant, so that --model=... can be set over it; what is typed must count.
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
    given = {**of_corpus(given, saved), **start.merged(given, decided, keys_of(config_class))}
    given = {**as_begun(saved, config_class), **given}

    config = TrainConfig(**{key: value for key, value in given.items() if key in run_keys})
    check_run(config)
    model_config = config_class(**{key: value for key, value in given.items() if key not in run_keys})
    check_decay(config, saved)
    keys = {**keys_of(TrainConfig), **keys_of(config_class)}
    refuse_idle(options, {**vars(config), **vars(model_config)}, keys)
    return config, model_config


def as_begun(saved: dict, config_class: type) -> dict:
    """Of a run that goes on, keys whose default is no longer what it was: unless told otherwise, it keeps its own."""
    old = {**saved["run_config"], **saved["model_config"]} if saved else {}
    return {key: old.get(key, before) for key, before in values_before(TrainConfig, config_class).items() if saved}


def of_corpus(given: dict, saved: dict) -> dict:
    """What the data decides where nothing is said, as far as it is known.

    vocab_size: that of the run which goes on, or the corpus's, padded for the GPU. block_size: that of a corpus whose
    documents are windows. ValueError: the corpus is damaged.
    """
    dataset = given.get("dataset", TrainConfig.dataset)
    documents = Windows.of(read_json(folder_of(dataset) / "meta.json"))
    length = {"block_size": documents.length} if documents else {}
    if saved:
        return {"vocab_size": {**defaults(saved["model"]), **saved["model_config"]}["vocab_size"], **length}
    size = vocab_size_of(dataset)
    return {"vocab_size": -(-size // 64) * 64, **length} if size else length


def check_run(c: TrainConfig) -> None:
    """Contradictions between run keys. ValueError: names the key, the value and the fix."""
    if c.min_lr is not None and c.min_lr > c.learning_rate:
        raise ValueError(f"min_lr={c.min_lr}: give a number from 0 to learning_rate={c.learning_rate}")
    if c.weight_decay_rate is not None:
        for key in ("learning_rate", *optimizer.OWN_RATES.values()):
            if getattr(c, key) == 0:
                raise ValueError(
                    f"weight_decay_rate={c.weight_decay_rate} with {key}=0: weights at a rate of 0 do "
                    f"not decay: leave weight_decay_rate out, or give a {key} above 0"
                )
    if c.kernels == "off" and c.state_interval != TrainConfig.state_interval:
        raise ValueError(f"state_interval={c.state_interval} has no effect with kernels=off: leave one of them out")
    if c.engine == "fsdp" and c.optimizer == "muon":
        raise ValueError("optimizer=muon with engine=fsdp: Muon needs whole matrices: give engine=ddp, or adamw")
    world = distributed.world_size()
    if c.global_batch_size % world:
        raise ValueError(f"global_batch_size={c.global_batch_size} does not divide over {world} processes")
    share = c.global_batch_size // world
    if share % c.rows:
        fits = max(size for size in range(1, c.rows) if share % size == 0)
        raise ValueError(
            f"micro_batch_size={c.rows} does not divide the {share} sequences per process "
            f"(global_batch_size={c.global_batch_size} over {world}): try --micro_batch_size={fits}"
        )


def check_decay(c: TrainConfig, saved: dict) -> None:
    """ValueError: the fall of `wsd` has more steps than there are after warm-up: it would begin
    with a cliff, far below the peak.

    saved: state.json of a run that goes on. One that began with such a fall keeps it.
    """
    most = max(c.max_steps - c.warmup_steps, 0)
    if c.schedule != "wsd" or c.decay_steps is None or c.decay_steps <= most:
        return
    before = saved["run_config"] if saved else {}
    if any(getattr(c, key) != before.get(key) for key in ("decay_steps", "max_steps")):
        raise ValueError(
            f"decay_steps={c.decay_steps}, but max_steps={c.max_steps} has {most} steps after "
            f"warmup_steps={c.warmup_steps}: give 0 to {most}, or leave it out for a fifth of the run"
        )


def defaults(stem: str) -> dict:
    """Every key of the run and of the stem's model as it is where a checkpoint lacks it: at its default, or, if that
    has changed since the key came in, at what it was before."""
    schemas = TrainConfig, model_class(stem).Config
    values = {key: value for schema in schemas for key, value in dataclasses.asdict(schema()).items()}
    return {**values, **values_before(*schemas)}


def open_data(config: TrainConfig, model_config):
    """(corpus, training batches, validation batches). ValueError: missing, damaged, too short, or too many tokens."""
    corpus = open_corpus(config.dataset)
    known, length = corpus.meta["vocab_size"], model_config.block_size
    if known > model_config.vocab_size:
        raise ValueError(f"vocab_size={model_config.vocab_size}, but {corpus.path} has {known} tokens: give {known}")
    if known != (size := size_of(describe(corpus.path))):
        raise ValueError(f"{corpus.path}: meta.json has vocab_size {known}, its tokenizer {size}: prepare it again")
    documents = Windows.of(corpus.meta)
    batches = TrainBatches(corpus.train, length, config.global_batch_size, config.seed, known, documents)
    if batches.windows < config.global_batch_size:
        raise ValueError(
            f"global_batch_size={config.global_batch_size}, but the training split of {corpus.path} has "
            f"{batches.windows} sequences of block_size={length}: give a smaller batch, or more text"
        )
    validation = ValidationBatches(corpus.val, length, known, documents)
    if config.eval_part != "all" and validation.windows < 2:
        raise ValueError(
            f"eval_part={config.eval_part}: the validation split of {corpus.path} has no two sequences of "
            f"block_size={length}; give a shorter one, or eval_part=all"
        )
    if documents and documents.labels:
        evaluated = validation.spread(config.eval_batches * config.global_batch_size, config.eval_part)
        for split, read, windows in (
            ("training", batches, range(batches.windows)),
            ("validation", validation, evaluated),
        ):
            if not has_targets(read.tokens, documents, windows):
                raise ValueError(
                    f"the {split} split of {corpus.path} has no label in the {len(windows)} documents "
                    "that are read of it: prepare it again"
                )
    return corpus, batches, validation


class Run:
    """What set_up() makes and the steps share."""

    config: TrainConfig
    model_config: Any
    out: Path
    world: distributed.World
    stop: stopping.Stop
    corpus: Any
    without_gradient: list[str]  # parameters that the loss does not depend on
    tokenizer: dict  # for every checkpoint, wherever the corpus is by then
    train_batches: TrainBatches
    val_batches: ValidationBatches
    progress: dict  # counters that a checkpoint keeps: start.progress_at
    model: Any  # in its own form; the next two are compiled, and on several devices
    train_model: Any
    eval_model: Any
    optimizers: list
    autocast: Any
    log: metrics.RunLog | None = None  # of the main process, as is the lock
    lock: start.RunLock | None = None
    commit: str = ""  # of the code, as far as the main process can tell


def set_up(argv: list[str]) -> Run | None:
    """Everything before the first step; None where nothing is to be trained, for a dry run or a finished one."""
    run = Run()
    with configurator.one_line_errors():  # All that a user can get wrong is checked before anything is written.
        run.config, run.model_config = config, model_config = configure(argv)
        settings = {**dataclasses.asdict(config), **dataclasses.asdict(model_config)}
        device = distributed.pick_device(config.device)
        if config.compile and not distributed.can_compile(device):
            raise ValueError("compile=True needs a C++ compiler and Python's headers: install them, or --compile=False")
        metrics.wandb_of(config)  # a missing package is said before anything is written
        memory.check_memory(config, model_config, device)
        run.corpus, run.train_batches, run.val_batches = open_data(config, model_config)
        run.out, run.tokenizer = Path(config.out_dir), describe(run.corpus.path)
        begin = start.find(config, settings, run.corpus.identity, defaults)
        run.progress = start.progress_at(begin, run.out)
        if nothing_to_train(run, begin):
            return None
        if begin and distributed.rank() == 0 and (note := start.new_rate(begin, config)):
            print(note)
        run.model, not_fused = make_model(run, begin, device)
        if config.dry_run:
            print(memory.size_of_run(config, run.model, run.train_batches.windows, device))
            return None

    run.world, run.stop = distributed.start(device), stopping.Stop(config.max_seconds)
    stopping.tolerate_lost_output()
    torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32 on a GPU, but for linear_fp32
    bf16 = distributed.computes_in_bfloat16(config.dtype, device)
    run.autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    with configurator.one_line_errors():
        facts = {"the configuration": settings, "the code": code_digest(), "the data": run.corpus.identity}
        if run.world.world_size > 1:
            facts["the weights they begin with"] = [p.double().sum().item() for p in run.model.parameters()]
        distributed.refuse_disagreement(run.world, {**facts, "the checkpoint": str(begin), "torch": torch.__version__})
        some_without = bool(run.without_gradient)
        models = distributed.parallelise(run.model, config.engine, config.compile, run.world, some_without)
        run.train_model, run.eval_model = models
        in_bf16 = bf16 if config.muon_dtype is None else config.muon_dtype == "bfloat16"
        muon_dtype = torch.bfloat16 if in_bf16 else torch.float32
        run.optimizers = optimizer.build_optimizers(run.model, config, muon_dtype)
        if begin:
            state = checkpoint.load_tensors(begin / "optimizer.safetensors")
            optimizer.load_named_state(run.optimizers, state, run.without_gradient)
        if run.world.is_main:
            run.lock, run.commit = start.RunLock(run.out), commit()
            stopping.write_status(run.out, run.progress["step"], config.max_steps, ended=None)
            checkpoint.set_aside(run.out, begin)
            run.log = metrics.RunLog(run.out, config, settings, run.progress, run.model, run.world)
            announce(run, "bfloat16" if bf16 else "float32", not_fused)
    return run


def announce(run: Run, dtype: str, not_fused: str | None) -> None:
    """Say what is about to be trained."""
    config, batches, device = run.config, run.train_batches, run.world.device
    print(
        f"{config.model}: {run.model.num_parameters():,} parameters, {dtype} on "
        f"{run.world.world_size} x {device.type}; run folder {run.out}\n{batches.windows:,} sequences an epoch; "
        f"each leaves out {batches.skipped:,} of {len(batches.tokens):,} tokens, not always the same"
    )
    if config.kernels != "off" and device.type == "cuda" and not_fused:
        print(f"note: no fused kernels: {not_fused}")
    if run.without_gradient:
        print(f"note: nothing of the loss depends on {', '.join(run.without_gradient)}: it will not be trained")
    for note in run.model_config.notes():
        print(f"note: {note}")
    if dtype == "float32" and run.model_config.state_dtype != "bfloat16":
        print("note: state_dtype=float32 has no effect where all is float32")
    if config.warmup_steps > config.max_steps:
        print(f"note: warmup_steps={config.warmup_steps} is longer than the run: it ends on the way up")
    if config.compile:
        print("compiling: the first step takes up to a minute or two", flush=True)


def nothing_to_train(run: Run, begin: Path | None) -> bool:
    """Whether the run has all its steps; then it says so."""
    step, steps = run.progress["step"], run.config.max_steps
    if step < steps or (step == steps and not run.progress["evaluated"]):
        return False
    if distributed.rank() == 0:
        print(f"{begin} has its {step} of max_steps={steps} steps: nothing to train")
        if not run.config.dry_run and run.out.is_dir():
            stopping.write_status(run.out, step, steps, "finished")
    return True


def make_model(run: Run, begin: Path | None, device: torch.device):
    """(the model with the weights it begins with, why its residual steps are not fused or None)."""
    config = run.config
    distributed.be_deterministic(config.deterministic)
    torch.manual_seed(config.seed)
    model = build(config.model, **dataclasses.asdict(run.model_config))
    with faults_of(config.model):
        run.without_gradient = optimizer.without_gradient(model)
    model.activation_checkpointing = config.activation_checkpointing
    not_fused = kernels.use(model, config.kernels, device, config.state_interval)
    if begin:
        weights.fill(model, begin)
        start.refuse_other_scales(model, config, begin)
    elif config.init_from is not None:
        start.load(model, config.init_from, run.corpus.path)
    return model, not_fused


def micro_batches(config: TrainConfig, batches: TrainBatches, first_step: int, world):
    """(ids, targets) of every micro-batch of this process from `first_step` (from 1) to the last, made in advance.

    Where those of a step have unequal numbers of targets, also what its loss counts, a scalar
    (`TrainBatches.shares`).
    """
    rows = config.rows
    firsts = range(world.rank * rows, config.global_batch_size, world.world_size * rows)
    positions = ((step - 1, first) for step in range(first_step, config.max_steps + 1) for first in firsts)
    shares_of = functools.lru_cache(1)(lambda step: batches.shares(step, rows))

    def made(position):
        step, first = position
        shares = shares_of(step)
        return batches.get(step, first, rows) + (() if shares is None else (shares[first // rows],))

    return prefetched(made, positions, world.device)


def gradients(run: Run, batches) -> outcome.Outcome:
    """Gradients of the next global batch, clipped: its loss in nats per token, the gradient norm before clipping, and
    whether any process wants to stop, when they are read."""
    accumulation = run.config.global_batch_size // run.world.world_size // run.config.rows
    loss_sum = 0.0
    for micro in range(accumulation):
        ids, targets, *share = next(batches)
        # Gradients are averaged over processes once, with the last micro-batch.
        with distributed.synchronising(run.train_model, micro == accumulation - 1):
            with run.autocast:
                _, loss = run.train_model(ids, targets)
            if share:  # without a target the loss is nan
                loss = torch.where(share[0] > 0, loss, 0.0) * share[0]
            (loss / accumulation).backward()
        loss_sum += loss.detach()
    grad_norm = distributed.clip_gradients(run.model, run.config.grad_clip)
    return outcome.outcome(loss_sum, accumulation, grad_norm, bool(run.stop.reason()), run.world)


def warm_up(run: Run) -> None:
    """A step that counts for nothing, at every start of several processes with the engine `ddp`.

    After its first backward pass DDP lays out its buckets anew, in the order in which gradients arrived, and where a
    gradient lies decides in which order three or more processes sum it. torch.compile cuts the graph in the first
    pass, if that is one of DDP's. With this step every step of a run, before and after a restart, finds the same.
    """
    if run.world.world_size == 1 or run.config.engine != "ddp":
        return
    begun = time.perf_counter()
    with configurator.one_line_errors(DamagedShard):
        gradients(run, micro_batches(run.config, run.train_batches, 1, run.world))
    run.model.zero_grad(set_to_none=True)
    run.progress["seconds"] += time.perf_counter() - begun


def train_step(run: Run, batches, step: int) -> bool:
    """One optimizer step, or a skipped one; whether the run shall stop after it."""
    begun, progress, optimizers = time.perf_counter(), run.progress, run.optimizers
    decide_on_device = outcome.decided_on(run.world.device, run.config)
    distributed.seed_step(run.config.seed, step, run.world)
    rates = optimizer.set_rates(optimizers, step - 1, run.config)
    with configurator.one_line_errors(DamagedShard):
        result = gradients(run, batches)
    if decide_on_device:
        optimizer.step_where(result.finite, optimizers)
    loss, grad_norm, stopped = result.read()
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if decide_on_device and not finite:
        optimizer.forget_unstepped(optimizers)
    if not finite and progress["skipped"] == run.config.skip_nonfinite:
        end_nonfinite(run, step, loss, grad_norm)
    for each in optimizers:
        if finite and not decide_on_device:
            each.step()
        each.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - begun
    progress["step"], progress["seconds"] = step, progress["seconds"] + seconds
    progress["skipped"] += not finite
    run.stop.step_took(seconds)
    if run.log and finite:
        run.log.training_step(progress, loss=loss, grad_norm=grad_norm, rates=rates)
    elif run.log:
        run.log.skipped_step(progress, loss, grad_norm)
    return stopped


def end_nonfinite(run: Run, step: int, loss: float, grad_norm: float) -> None:
    """End before a step whose loss or gradient is not finite, with a diagnosis and the state before the step."""
    diagnosis = outcome.diagnose(step, loss, grad_norm, run.model, run.optimizers, run.train_batches, run.world)
    saved = save(run, "nonfinite")
    distributed.stop(run.world)
    if run.world.is_main:
        reason = outcome.message(diagnosis, run.out / "nonfinite", saved)
        stopping.write_status(run.out, step - 1, run.config.max_steps, "failed", reason)
        configurator.end(reason, 1)
    sys.exit(1)


def record_statistics(run: Run) -> None:
    """Statistics of the residual stream over the first validation sequences."""
    first = list(range(min(4, run.val_batches.windows)))
    ids, _ = run.val_batches.get(first, len(first))
    statistics = residual_statistics(run.model, ids.to(run.world.device), run.autocast)
    if run.log:
        run.log.write(run.progress, residual=statistics)


def validate(run: Run, final: bool) -> bool:
    """Evaluate on validation sequences, all of them at the end where asked for; False: it was stopped, to be redone."""
    config, batches = run.config, run.val_batches
    count = None if final and config.eval_full else config.eval_batches * config.global_batch_size
    windows = batches.spread(count, config.eval_part)
    where = (run.eval_model, batches, windows, config.rows, run.world, run.autocast)
    with configurator.one_line_errors(DamagedShard):
        scores = evaluate(*where, run.stop.reason, each=final and config.eval_full)
    run.progress["evaluated"] = scores is not None
    if run.log and scores:
        if (losses := scores.pop("losses", None)) is not None:
            keep_losses(run, windows, losses)
        run.log.evaluation(run.progress, scores, run.corpus.bytes_per_token("val"), len(windows), batches.windows)
    return scores is not None


def keep_losses(run: Run, windows: list[int], losses) -> None:
    """Leave the loss of every validation window in the run folder, with its number and the step."""
    file, step = run.out / "losses.npz", run.progress["step"]
    try:
        save_losses(file, loss=losses, window=np.array(windows), step=np.array(step))
    except OSError as error:
        print(f"warning: step {step}: {file} is not written ({error})", file=sys.stderr)


def save(run: Run, subfolder: str = "") -> bool:
    """Whether the checkpoint was written; every process must call it."""
    begun, config = time.perf_counter(), run.config
    tensors = distributed.gathered(checkpoint.weights_of(run.model), run.world)
    optimizer_state = distributed.gathered(optimizer.named_state(run.optimizers), run.world)
    if not run.world.is_main:
        return True
    state = {"model": config.model, "model_config": dataclasses.asdict(run.model_config), **run.progress}
    state |= {"run_config": dataclasses.asdict(config), "corpus": run.corpus.identity}
    state["commit"] = run.commit
    state["trained_on"] = {**machine(), "device": run.world.device.type, "processes": run.world.world_size}
    state["lr_scales"] = optimizer.lr_scales(run.model, config.optimizer == "muon")
    run.log.file.sync()
    try:
        path = checkpoint.save(run.out / subfolder, tensors, optimizer_state, state, run.tokenizer)
    except OSError as error:
        step = run.progress["step"]
        print(f"warning: step {step}: no checkpoint ({error}); the one before is kept", file=sys.stderr)
        return False
    print(f"saved {path}", flush=True)
    checkpoint.remove_old(run.out, config.keep_last, config.keep_every)
    run.stop.save_took(time.perf_counter() - begun)
    return True


def finish(run: Run, saved: bool) -> None:
    """Leave the other processes, say how the run ended, and exit with a code that tells it."""
    step, steps = run.progress["step"], run.config.max_steps
    if run.log:
        run.log.close()
    distributed.stop(run.world)
    ended, reason = "finished", ""
    if not saved:
        ended, reason = "failed", f"step {step} is not saved: free disk space and start again with --resume=auto"
    elif step < steps or not run.progress["evaluated"]:
        ended, reason = "stopped", run.stop.reason() or "another process was told to"
    if run.world.is_main:
        stopping.write_status(run.out, step, steps, ended, reason)
    if ended == "failed":
        configurator.end(reason, 1)
    if ended == "stopped":
        if run.world.is_main:
            print(f"stopped ({reason}) after step {step}; --resume=auto goes on")
        # torchrun would take any other code for a fault, and start the run again at once.
        sys.exit(0 if "TORCHELASTIC_RUN_ID" in os.environ else stopping.EXIT_CODE)


def main():
    run = set_up(sys.argv[1:])
    if run is None:
        return
    config, progress = run.config, run.progress
    # A run that was stopped within an evaluation begins with that.
    first = progress["step"] + (1 if progress["evaluated"] else 0)
    warm_up(run)
    batches = micro_batches(config, run.train_batches, progress["step"] + 1, run.world)
    saved = stopped = False
    for step in range(first, config.max_steps + 1):
        final = step == config.max_steps
        if step > progress["step"]:
            stopped = train_step(run, batches, step)
            if config.statistics_interval and step % config.statistics_interval == 0:
                record_statistics(run)
        if final or step % config.eval_interval == 0:
            stopped = not validate(run, final) or stopped
        if final or stopped or step % config.checkpoint_interval == 0:
            saved = save(run)
        if stopped and not (final and progress["evaluated"]):
            break
    finish(run, saved)


MEMORY = "give a smaller --micro_batch_size, or --activation_checkpointing=True, and go on with --resume=auto"

if __name__ == "__main__":
    with configurator.one_line_errors(MemoryError, memory=MEMORY):
        main()
