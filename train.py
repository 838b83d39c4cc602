"""Train one variant.

    python train.py config/demo_cpu.py                                    one process, CPU or GPU
    torchrun --nproc_per_node=4 train.py config/ddl_dv4_small.py          four GPUs, the same optimisation
    python train.py config/ddl_dv4_small.py --ddl_beta_init=0.5 --out_dir=runs/beta05
    python train.py [CONFIG.py] --help                                    every key

The defaults are the paper's recipe (Deep Delta Learning, arXiv 2601.00417); a config file overrides them, the command
line overrides the file. The run folder receives metrics.jsonl and checkpoints; `report.py curves` draws it and
`sample.py` reads what it learned.
"""

import dataclasses
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split
import torch

from data.loader import TrainBatches, ValidationBatches, prefetched
from data.shards import DamagedShard, open_corpus, vocab_size_of
from data.tokenizer import describe, size_of
from model import STEMS, build, kernels, model_class
from training import (
    checkpoint,
    distributed,
    estimate,
    init_from,
    metrics,
    nonfinite,
    optimizer,
    outcome,
    parallel,
    resume,
    stopping,
)
from training.evaluation import evaluate
from training.provenance import code_digest
from training.residual_statistics import residual_statistics


@dataclass
class TrainConfig:
    """Keys of the run."""

    model: Annotated[str, "variant: a file of model/ without .py"] = "gpt-mha-rope"
    dataset: Annotated[str, "folder of token shards: a name under data/, or a path"] = "fineweb_edu"
    out_dir: Annotated[str | None, "run folder; None: runs/<name of the config file>"] = None
    resume: Annotated[str | None, "auto: start, or continue out_dir; a path: continue that run or checkpoint"] = None
    init_from: Annotated[str | None, "folder whose weights training starts from: a run, exported or released"] = None
    dry_run: Annotated[bool, "check everything, print the size of the run, and exit"] = False
    seed: Annotated[int, "seed of initialisation and data order"] = 0
    device: Annotated[Literal["auto", "cuda", "cpu"], "auto: the GPU where there is one"] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], "compute type; weights stay float32; auto: bfloat16 on a GPU"
    ] = "auto"
    compile: Annotated[bool, "torch.compile the model; on a CPU it needs a C++ compiler"] = True
    kernels: Annotated[Literal["auto", "on", "off"], "fused residual steps; auto: on a GPU that has them"] = "auto"
    state_interval: Annotated[int, "kernels: sublayers between states kept for the backward pass; 4 saves memory"] = 2
    engine: Annotated[Literal["ddp", "fsdp"], "several processes: a copy each, or a part of every parameter"] = "ddp"
    activation_checkpointing: Annotated[bool, "keep the states between blocks alone; compute blocks again"] = False
    deterministic: Annotated[bool, "on a GPU: only operations that give the same bits every time"] = False

    max_steps: Annotated[int, "optimizer steps"] = 100_000
    max_seconds: Annotated[float | None, "save and exit (code 75) within this time; None: no limit"] = None
    global_batch_size: Annotated[int, "sequences per step, over all processes"] = 480
    micro_batch_size: Annotated[int, "most sequences per process and forward pass; smaller saves memory"] = 20
    optimizer: Annotated[Literal["adamw", "muon"], "muon: Muon on the sublayers' matrices, AdamW on the rest"] = "adamw"
    learning_rate: Annotated[float, "peak learning rate"] = 1e-3
    min_lr: Annotated[float | None, "learning rate at the last step; None: learning_rate / 20"] = None
    schedule: Annotated[Literal["cosine", "wsd"], "after warmup; wsd: stay, at the end fall linearly"] = "cosine"
    warmup_steps: Annotated[int, "steps of linear warmup"] = 2000
    decay_steps: Annotated[int, "wsd: steps of the fall to min_lr"] = 10_000
    weight_decay: Annotated[float, "on parameters of two or more dimensions"] = 0.1
    beta1: Annotated[float, "AdamW: decay of the mean gradient"] = 0.9
    beta2: Annotated[float, "AdamW: decay of the mean squared gradient"] = 0.95
    grad_clip: Annotated[float, "largest norm of the whole gradient; 0: no clipping"] = 1.0
    skip_nonfinite: Annotated[int, "steps with a loss or gradient that is no number to skip, before stopping"] = 0

    eval_interval: Annotated[int, "steps between evaluations"] = 1000
    eval_batches: Annotated[int, "global batches per evaluation, spread over the validation split"] = 8
    eval_full: Annotated[bool, "evaluate every validation token after the last step"] = True
    log_interval: Annotated[int, "steps between progress lines; metrics.jsonl has every step"] = 10
    checkpoint_interval: Annotated[int, "steps between checkpoints; the last step always has one"] = 1000
    keep_last: Annotated[int, "newest checkpoints kept"] = 2
    keep_every: Annotated[int, "also keep those whose step is a multiple of this; 0: none"] = 0
    statistics_interval: Annotated[int, "steps between statistics of the residual stream; 0: none"] = 0
    wandb_log: Annotated[bool, "log to Weights & Biases as well"] = False
    wandb_project: Annotated[str, "its project"] = "deep-delta-learning"
    wandb_run_name: Annotated[str | None, "its run name; None: wandb's choice"] = None
    tensorboard: Annotated[bool, "write TensorBoard's files to the run folder as well"] = False


def configure(argv: list[str]):
    """(TrainConfig, the stem's model Config) from a config file and `--key=value`. ValueError: any mistake in them."""
    files, options = configurator.split_arguments(argv)
    if len(files) > 1:
        raise ValueError(f"one config file, then --key=value; got {' '.join(files)}")
    from_file = configurator.read_file(files[0]) if files else {}
    anywhere = configurator.knobs(TrainConfig, *(model_class(stem).Config for stem in STEMS))
    if "help" in options:
        print(configurator.help_text(f"{__doc__}\nKeys and defaults:", anywhere))
        sys.exit(0)
    configurator.refuse_unknown(options, anywhere, dashes="--")
    options.update({"resume": "auto"} if options.get("resume") == "True" else {})
    name = Path(files[0]).stem if files else options.get("model")
    out_dir = {"out_dir": f"runs/{name}"} if name else {}
    settled = init_from.settled({**out_dir, **from_file}, options, anywhere)
    stem = options.get("model", from_file.get("model", settled.get("model", TrainConfig.model)))
    stem = configurator.parse("model", stem, anywhere)
    model_config = model_class(stem).Config
    schema = configurator.knobs(TrainConfig, model_config)

    # A file may carry keys of another variant, so that --model=... can be set over it; what is typed must count.
    elsewhere = sorted(key for key in configurator.check(from_file, anywhere) if key not in schema)
    for key in sorted(options.keys() & (anywhere.keys() - schema.keys())):
        raise ValueError(f"--{key} is not a key of {stem}: leave it out, or choose another --model")
    if elsewhere and distributed.rank() == 0:
        print(f"note: {', '.join(elsewhere)} of {files[0]} do not concern {stem}")
    values = configurator.check({k: v for k, v in from_file.items() if k in schema}, schema)
    values.update({key: configurator.parse(key, text, schema) for key, text in options.items()})
    values["out_dir"] = values.get("out_dir") or f"runs/{Path(files[0]).stem if files else stem}"
    values = {**vocabulary(values), **init_from.merged(values, settled)}

    run_keys = {field.name for field in dataclasses.fields(TrainConfig)}
    config = TrainConfig(**{key: value for key, value in values.items() if key in run_keys})
    check_run(config)
    return config, model_config(**{key: value for key, value in values.items() if key not in run_keys})


def vocabulary(values: dict) -> dict:
    """{"vocab_size": that of the run which goes on, or the corpus's, padded for the GPU}; {} where neither is known."""
    if values.get("resume") and (state := init_from.own_state(values["resume"], values["out_dir"])):
        return {"vocab_size": {**defaults(state["model"]), **state["model_config"]}["vocab_size"]}
    size = vocab_size_of(values.get("dataset", TrainConfig.dataset))
    return {"vocab_size": -(-size // 64) * 64} if size else {}


def check_run(c: TrainConfig) -> None:
    """Ranges and contradictions between run keys. ValueError: names the key, the value and the fix."""
    least = dict.fromkeys(("max_steps", "global_batch_size", "micro_batch_size", "keep_last", "state_interval"), 1)
    least |= dict.fromkeys(("eval_interval", "eval_batches", "log_interval", "checkpoint_interval"), 1)
    least |= dict.fromkeys(("decay_steps", "keep_every", "skip_nonfinite", "statistics_interval"), 0)
    least |= dict.fromkeys(("warmup_steps", "seed", "learning_rate", "weight_decay", "grad_clip"), 0)
    for name, low in least.items():
        if getattr(c, name) < low:
            raise ValueError(f"{name}={getattr(c, name)}: give {low} or more")
    if c.seed >= 2**63:
        raise ValueError(f"seed={c.seed}: give less than 2**63")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)}: give a number from 0 to below 1")
    if c.min_lr is not None and not 0 <= c.min_lr <= c.learning_rate:
        raise ValueError(f"min_lr={c.min_lr}: give a number from 0 to learning_rate={c.learning_rate}")
    if c.max_seconds is not None and c.max_seconds <= 0:
        raise ValueError(f"max_seconds={c.max_seconds}: give a number above 0, or None")
    if c.kernels == "off" and c.state_interval != TrainConfig.state_interval:
        raise ValueError(f"state_interval={c.state_interval} has no effect with kernels=off: leave one of them out")
    if c.engine == "fsdp" and c.optimizer == "muon":
        raise ValueError("optimizer=muon with engine=fsdp: Muon needs whole matrices: give engine=ddp, or adamw")
    world = distributed.world_size()
    if c.global_batch_size % world:
        raise ValueError(f"global_batch_size={c.global_batch_size} does not divide over {world} processes")
    share, rows = c.global_batch_size // world, micro_batch_rows(c)
    if share % rows:
        fits = max(size for size in range(1, rows) if share % size == 0)
        raise ValueError(
            f"micro_batch_size={rows} does not divide the {share} sequences per process "
            f"(global_batch_size={c.global_batch_size} over {world}): try --micro_batch_size={fits}"
        )


def micro_batch_rows(c: TrainConfig) -> int:
    """Sequences per forward pass: micro_batch_size, or a process's whole share of the batch where that is less."""
    return min(c.micro_batch_size, c.global_batch_size // distributed.world_size())


GO_ON = "--resume=auto goes on"  # sweep.py looks for it


def defaults(stem: str) -> dict:
    """Every key of the run and of the stem's model, at its default."""
    return {**dataclasses.asdict(TrainConfig()), **dataclasses.asdict(model_class(stem).Config())}


def open_data(config: TrainConfig, model_config):
    """(corpus, training batches, validation batches). ValueError: missing, damaged, too short, or too many tokens."""
    corpus = open_corpus(config.dataset)
    known, length = corpus.meta["vocab_size"], model_config.block_size
    if known > model_config.vocab_size:
        raise ValueError(f"vocab_size={model_config.vocab_size}, but {corpus.path} has {known} tokens: give {known}")
    if known != (size := size_of(describe(corpus.path))):
        raise ValueError(f"{corpus.path}: meta.json has vocab_size {known}, its tokenizer {size}: prepare it again")
    window = corpus.meta.get("window_tokens")
    batches = TrainBatches(corpus.train, length, config.global_batch_size, config.seed, known, window)
    if batches.windows < config.global_batch_size:
        raise ValueError(
            f"global_batch_size={config.global_batch_size}, but the training split of {corpus.path} has "
            f"{batches.windows} sequences of block_size={length}: give a smaller batch, or more text"
        )
    return corpus, batches, ValidationBatches(corpus.val, length, known, window)


def micro_batches(config: TrainConfig, batches: TrainBatches, first_step: int, world):
    """(ids, targets) of every micro-batch of this process from `first_step` (from 1) to the last, made in advance."""
    rows = micro_batch_rows(config)
    firsts = range(world.rank * rows, config.global_batch_size, world.world_size * rows)
    places = ((step - 1, first) for step in range(first_step, config.max_steps + 1) for first in firsts)
    return prefetched(lambda place: batches.get(*place, rows), places, world.device)


def train_step(config: TrainConfig, model, batches, world, autocast, stop) -> outcome.Outcome:
    """Gradients of the next global batch, clipped: its loss in nats per token, the gradient norm before clipping, and
    whether any process wants to stop, when they are read."""
    accumulation = config.global_batch_size // world.world_size // micro_batch_rows(config)
    loss_sum = 0.0
    for micro in range(accumulation):
        ids, targets = next(batches)
        # Gradients are averaged over processes once, with the last micro-batch.
        with parallel.synchronising(model, micro == accumulation - 1):
            with autocast:
                _, loss = model(ids, targets)
            (loss / accumulation).backward()
        loss_sum += loss.detach()
    grad_norm = parallel.clip_gradients(model, config.grad_clip)
    return outcome.outcome(loss_sum, accumulation, grad_norm, bool(stop.reason()), world)


def main():
    # Everything a user can get wrong is checked before anything is written.
    with configurator.one_line_errors():
        config, model_config = configure(sys.argv[1:])
        settings = {**dataclasses.asdict(config), **dataclasses.asdict(model_config)}
        device = distributed.pick_device(config.device)
        if config.compile and not distributed.can_compile(device):
            raise ValueError("compile=True needs a C++ compiler and Python's headers: install them, or --compile=False")
        metrics.optional_packages(config)
        estimate.check_memory(config, model_config, micro_batch_rows(config), device)
        corpus, train_batches, val_batches = open_data(config, model_config)
        tokenizer = describe(corpus.path)  # for every checkpoint, wherever the corpus is by then
        start = resume.find_start(config, settings, corpus.identity, defaults)
        state = resume.new_state()
        if start:
            saved = checkpoint.read_state(start)
            state |= {key: saved[key] for key in state if key in saved}
            if not start.resolve().is_relative_to(Path(config.out_dir).resolve()):
                state["wandb_id"] = None  # a branch is a run of its own
        if state["step"] > config.max_steps or (state["step"] == config.max_steps and state["evaluated"]):
            if distributed.rank() == 0:
                print(f"{start} has its {state['step']} of max_steps={config.max_steps} steps: nothing to train")
            return
        distributed.be_deterministic(config.deterministic)
        torch.manual_seed(config.seed)
        model = build(config.model, **dataclasses.asdict(model_config))
        model.activation_checkpointing = config.activation_checkpointing
        plain = kernels.use(model, config.kernels, device, config.state_interval)
        if start:
            checkpoint.load_weights(model, start)
        elif config.init_from is not None:
            init_from.load(model, config.init_from, corpus.path)
    if config.dry_run:
        print(estimate.size_of_run(config, model, train_batches.windows, micro_batch_rows(config), device))
        return

    world = distributed.start(device)
    stop = stopping.Stop(config.max_seconds)
    stopping.tolerate_lost_output()
    torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32 on a GPU
    bf16 = config.dtype == "bfloat16" or (config.dtype == "auto" and device.type == "cuda")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    out, log = Path(config.out_dir), None
    with configurator.one_line_errors():
        facts = {"the configuration": settings, "the code": code_digest(), "the data": corpus.identity}
        if world.world_size > 1 and config.init_from is not None and not start:
            facts["the weights of init_from"] = init_from.identity(config.init_from)
        distributed.refuse_disagreement(world, {**facts, "the checkpoint": str(start), "torch": torch.__version__})
        run_model, eval_model = parallel.parallelise(model, config.engine, config.compile, world)
        optimizers = optimizer.build_optimizers(model, config)
        if start:
            optimizer.load_named_state(optimizers, checkpoint.load_tensors(start / "optimizer.safetensors"))
        if world.is_main:
            lock = resume.RunLock(out)  # noqa: F841 (held while this function runs)
            checkpoint.set_aside(out, start)
            log = metrics.RunLog(out, config, settings, state, model, world)
    if world.is_main:
        print(
            f"{config.model}: {model.num_parameters():,} parameters, {'bfloat16' if bf16 else 'float32'} on "
            f"{world.world_size} x {device.type}; run folder {out}\n{train_batches.windows:,} sequences an epoch; "
            f"each leaves out {train_batches.skipped:,} of {len(train_batches.tokens):,} tokens, not always the same"
        )
        if config.kernels != "off" and device.type == "cuda" and plain:
            print(f"note: no fused kernels: {plain}")
        if config.warmup_steps > config.max_steps:
            print(f"note: warmup_steps={config.warmup_steps} is longer than the run: it ends on the way up")
        if config.compile:
            print("compiling: the first step takes up to a minute or two", flush=True)

    def save(subfolder: str = "") -> bool:
        """Whether the checkpoint was written; every process must call it."""
        save_start = time.perf_counter()
        weights = parallel.gathered(checkpoint.weights_of(model), world)
        optimizer_state = parallel.gathered(optimizer.named_state(optimizers), world)
        if not world.is_main:
            return True
        saved = {"model": config.model, "model_config": dataclasses.asdict(model_config), **state}
        saved |= {"run_config": dataclasses.asdict(config), "corpus": corpus.identity}
        log.file.sync()
        try:
            path = checkpoint.save(out / subfolder, weights, optimizer_state, saved, tokenizer)
        except OSError as error:
            print(f"warning: step {state['step']}: no checkpoint ({error}); the one before is kept", file=sys.stderr)
            return False
        print(f"saved {path}", flush=True)
        checkpoint.remove_old(out, config.keep_last, config.keep_every)
        stop.save_took(time.perf_counter() - save_start)
        return True

    batches = micro_batches(config, train_batches, state["step"] + 1, world)
    decide_on_device = outcome.decided_on(device, config)
    # A run that was stopped within an evaluation begins with that.
    for step in range(state["step"] + (1 if state["evaluated"] else 0), config.max_steps + 1):
        final, stopped = step == config.max_steps, False
        if step > state["step"]:
            step_start = time.perf_counter()
            distributed.seed_step(config.seed, step, world)
            lr = optimizer.learning_rate_at(step - 1, config)
            optimizer.set_learning_rate(optimizers, lr)
            with configurator.one_line_errors(DamagedShard):
                result = train_step(config, run_model, batches, world, autocast, stop)
            if decide_on_device:
                optimizer.step_where(result.finite, optimizers)
            loss, grad_norm, stopped = result.read()
            finite = math.isfinite(loss) and math.isfinite(grad_norm)
            if decide_on_device and not finite:
                optimizer.forget_unstepped(optimizers)
            if not finite and state["skipped"] == config.skip_nonfinite:
                found = nonfinite.diagnose(step, loss, grad_norm, model, optimizers, train_batches, world)
                written = save("nonfinite")
                distributed.stop(world)
                if world.is_main:
                    configurator.end(nonfinite.message(found, out / "nonfinite", written), 1)
                sys.exit(1)
            for each in optimizers:
                if finite and not decide_on_device:
                    each.step()
                each.zero_grad(set_to_none=True)
            state["skipped"] += not finite
            step_seconds = time.perf_counter() - step_start
            state["step"], state["seconds"] = step, state["seconds"] + step_seconds
            stop.step_took(step_seconds)
            if log and finite:
                log.training_step(state, loss=loss, grad_norm=grad_norm, lr=lr)
            elif log:
                log.skipped_step(state, loss, grad_norm)
            if config.statistics_interval and step % config.statistics_interval == 0:
                first = list(range(min(4, val_batches.windows)))
                ids, _ = val_batches.get(first, len(first))
                found = residual_statistics(model, ids.to(device), autocast)
                if log:
                    log.write(state, residual=found)

        if final or step % config.eval_interval == 0:
            count = config.eval_batches * config.global_batch_size
            windows = val_batches.spread(val_batches.windows if final and config.eval_full else count)
            rows, scored_from = micro_batch_rows(config), corpus.meta.get("scored_from")
            with configurator.one_line_errors(DamagedShard):
                scores = evaluate(eval_model, val_batches, windows, rows, world, autocast, scored_from, stop.reason)
            state["evaluated"], stopped = scores is not None, stopped or scores is None
            if log and scores:
                log.evaluation(state, scores, corpus.bytes_per_token("val"), len(windows), val_batches.windows)
        if final or stopped or step % config.checkpoint_interval == 0:
            written = save()
        if stopped and not (final and state["evaluated"]):
            break
    if log:
        log.close()
    distributed.stop(world)
    if not written:
        configurator.end(f"step {state['step']} is not saved: free disk space and start again with --resume=auto", 1)
    if state["step"] < config.max_steps or not state["evaluated"]:
        if world.is_main:
            print(f"stopped ({stop.reason() or 'another process was told to'}) after step {state['step']}; {GO_ON}")
        # torchrun would take any other code for a fault, and start the run again at once.
        sys.exit(0 if "TORCHELASTIC_RUN_ID" in os.environ else stopping.EXIT_CODE)


MEMORY = "give a smaller --micro_batch_size, or --activation_checkpointing=True, and go on with --resume=auto"

if __name__ == "__main__":
    with configurator.one_line_errors(MemoryError, memory=MEMORY):
        main()
