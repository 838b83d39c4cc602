"""Train one variant.

    python train.py config/demo_cpu.py                                    one process, CPU or GPU
    torchrun --nproc_per_node=4 train.py config/ddl_dv4_small.py          four GPUs, the same optimisation
    python train.py config/ddl_dv4_small.py --ddl_beta_init=0.5 --out_dir=runs/beta05
    python train.py [CONFIG.py] --help                                    every key

The defaults are the paper's recipe (Deep Delta Learning, arXiv 2601.00417); a config file overrides them, the command
line overrides the file. The run folder receives metrics.jsonl and checkpoints; `report.py curves` draws it and
`sample.py` reads what it learned.
"""

import contextlib
import dataclasses
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

import configurator
from data.loader import TrainBatches, ValidationBatches, prefetched
from data.shards import DamagedShard, open_corpus
from data.tokenizer import describe, size_of
from model import STEMS, build, model_class
from training import checkpoint, distributed, metrics, optimizer
from training.evaluation import evaluate


@dataclass
class TrainConfig:
    """Keys of the run."""

    model: Annotated[str, "variant: a file of model/ without .py"] = "gpt-mha-rope"
    dataset: Annotated[str, "folder of token shards: a name under data/, or a path"] = "fineweb_edu"
    out_dir: Annotated[str | None, "run folder; None: runs/<name of the config file>"] = None
    resume: Annotated[str | None, "auto: start, or continue out_dir; a path: continue that run or checkpoint"] = None
    dry_run: Annotated[bool, "check everything, print the size of the run, and exit"] = False
    seed: Annotated[int, "seed of initialisation and data order"] = 0
    device: Annotated[Literal["auto", "cuda", "cpu"], "auto: the GPU where there is one"] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], "compute type; weights stay float32; auto: bfloat16 on a GPU"
    ] = "auto"
    compile: Annotated[bool, "torch.compile the model; on a CPU it needs a C++ compiler"] = True

    max_steps: Annotated[int, "optimizer steps"] = 100_000
    global_batch_size: Annotated[int, "sequences per step, over all processes"] = 480
    micro_batch_size: Annotated[int, "most sequences per process and forward pass; smaller saves memory"] = 20
    optimizer: Annotated[Literal["adamw", "muon"], "muon: Muon on the sublayers' matrices, AdamW on the rest"] = "adamw"
    learning_rate: Annotated[float, "peak learning rate"] = 1e-3
    min_lr: Annotated[float | None, "learning rate at the last step; None: learning_rate / 20"] = None
    warmup_steps: Annotated[int, "steps of linear warmup before the cosine"] = 2000
    weight_decay: Annotated[float, "on parameters of two or more dimensions"] = 0.1
    beta1: Annotated[float, "AdamW: decay of the mean gradient"] = 0.9
    beta2: Annotated[float, "AdamW: decay of the mean squared gradient"] = 0.95
    grad_clip: Annotated[float, "largest norm of the whole gradient; 0: no clipping"] = 1.0

    eval_interval: Annotated[int, "steps between evaluations"] = 1000
    eval_batches: Annotated[int, "global batches per evaluation, spread over the validation split"] = 8
    eval_full: Annotated[bool, "evaluate every validation token after the last step"] = True
    log_interval: Annotated[int, "steps between progress lines; metrics.jsonl has every step"] = 10
    checkpoint_interval: Annotated[int, "steps between checkpoints; the last step always has one"] = 1000
    keep_last: Annotated[int, "checkpoints kept"] = 2
    wandb_log: Annotated[bool, "log to Weights & Biases as well"] = False
    wandb_project: Annotated[str, "its project"] = "deep-delta-learning"
    wandb_run_name: Annotated[str | None, "its run name; None: wandb's choice"] = None


RESUME_MAY_CHANGE = {
    *("resume", "out_dir", "dry_run", "max_steps", "micro_batch_size", "device", "compile", "keep_last", "eval_full"),
    *("eval_interval", "log_interval", "checkpoint_interval"),
    *("wandb_log", "wandb_project", "wandb_run_name"),
}


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
    stem = configurator.parse("model", options.get("model", from_file.get("model", TrainConfig.model)), anywhere)
    model_config = model_class(stem).Config
    schema = configurator.knobs(TrainConfig, model_config)

    # A file may carry keys of another variant, so that --model=... can be set over it; what is typed must count.
    elsewhere = sorted(key for key in configurator.check(from_file, anywhere) if key not in schema)
    for key in sorted(options.keys() & (anywhere.keys() - schema.keys())):
        raise ValueError(f"--{key} is not a key of {stem}: leave it out, or choose another --model")
    if elsewhere and distributed.rank() == 0:
        print(f"note: {', '.join(elsewhere)} of {files[0]} do not concern {stem}")
    values = configurator.check({k: v for k, v in from_file.items() if k in schema}, schema)
    options.update({"resume": "auto"} if options.get("resume") == "True" else {})
    values.update({key: configurator.parse(key, text, schema) for key, text in options.items()})
    values.setdefault("out_dir", f"runs/{Path(files[0]).stem if files else stem}")

    run_keys = {field.name for field in dataclasses.fields(TrainConfig)}
    config = TrainConfig(**{key: value for key, value in values.items() if key in run_keys})
    check_run(config)
    return config, model_config(**{key: value for key, value in values.items() if key not in run_keys})


def check_run(c: TrainConfig) -> None:
    """Ranges and contradictions between run keys. ValueError: names the key, the value and the fix."""
    least = dict.fromkeys(("max_steps", "global_batch_size", "micro_batch_size", "keep_last"), 1)
    least |= dict.fromkeys(("eval_interval", "eval_batches", "log_interval", "checkpoint_interval"), 1)
    least |= dict.fromkeys(("warmup_steps", "seed", "learning_rate", "weight_decay", "grad_clip"), 0)
    for name, low in least.items():
        if getattr(c, name) < low:
            raise ValueError(f"{name}={getattr(c, name)}: give {low} or more")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)}: give a number from 0 to below 1")
    if c.min_lr is not None and not 0 <= c.min_lr <= c.learning_rate:
        raise ValueError(f"min_lr={c.min_lr}: give a number from 0 to learning_rate={c.learning_rate}")
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


def defaults(stem: str) -> dict:
    """Every key of the run and of the stem's model, at its default."""
    return {**dataclasses.asdict(TrainConfig()), **dataclasses.asdict(model_class(stem).Config())}


def find_start(config: TrainConfig, settings: dict, corpus: dict) -> Path | None:
    """The checkpoint to continue from, None for a fresh run. ValueError: the run folder or checkpoint forbids it."""
    out = Path(config.out_dir)
    if config.resume is None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"out_dir={out} is not empty: continue it with --resume=auto, or give another --out_dir")
        return None
    if config.resume == "auto":
        found = checkpoint.all_of(out)
        own = ("metrics.jsonl", "metrics.jsonl.tmp", "checkpoints", "wandb", "nonfinite")
        if not found and out.exists() and any(file.name not in own for file in out.iterdir()):
            raise ValueError(f"out_dir={out} holds other files and no checkpoint: give another --out_dir")
        start = found[-1] if found else None
    else:
        start = checkpoint.find(config.resume)
        own = checkpoint.all_of(out)
        if own and own[-1].resolve() != start.resolve():
            raise ValueError(f"out_dir={out} has {own[-1].name}, not {start}, as its newest: give another --out_dir")
    if start is not None:
        saved = checkpoint.read_state(start)
        if saved["corpus"] != corpus:
            raise ValueError(
                f"dataset={config.dataset} is not the corpus that {start} was trained on (shards or meta.json differ): "
                "prepare that one again, or give another --out_dir without --resume"
            )
        # A key that is newer than the checkpoint was at its default.
        before = {**defaults(saved["model"]), **saved["model_config"], **saved["run_config"]}
        for key in sorted((before.keys() | settings.keys()) - RESUME_MAY_CHANGE):
            if before.get(key) != settings.get(key):
                raise ValueError(
                    f"{key}={settings.get(key)!r}, but {start} was trained with {before.get(key)!r}: "
                    "give that value, or another --out_dir without --resume"
                )
    return start


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


def train_step(config: TrainConfig, model, batches, world, autocast) -> tuple[float, float]:
    """Gradients of the next global batch, clipped. Returns (loss in nats per token, gradient norm before clipping)."""
    accumulation = config.global_batch_size // world.world_size // micro_batch_rows(config)
    loss_sum = 0.0
    for micro in range(accumulation):
        ids, targets = next(batches)
        # DDP averages gradients over processes once, with the last micro-batch.
        synchronise = micro == accumulation - 1 or world.world_size == 1
        with contextlib.nullcontext() if synchronise else model.no_sync():
            with autocast:
                _, loss = model(ids, targets)
            (loss / accumulation).backward()
        loss_sum += loss.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf).item()
    return world.sum(float(loss_sum))[0] / accumulation / world.world_size, grad_norm


def main():
    # Everything a user can get wrong is checked before anything is written.
    with configurator.one_line_errors():
        config, model_config = configure(sys.argv[1:])
        settings = {**dataclasses.asdict(config), **dataclasses.asdict(model_config)}
        device = distributed.pick_device(config.device)
        if config.compile and not distributed.can_compile(device):
            raise ValueError("compile=True needs a C++ compiler and Python's headers: install them, or --compile=False")
        corpus, train_batches, val_batches = open_data(config, model_config)
        start = find_start(config, settings, corpus.identity)
        state = {"step": 0, "seconds": 0.0}
        if start:
            state = {key: checkpoint.read_state(start)[key] for key in state}
        if state["step"] >= config.max_steps:
            if distributed.rank() == 0:
                print(f"{start} has its {state['step']} of max_steps={config.max_steps} steps: nothing to train")
            return
        torch.manual_seed(config.seed)
        model = build(config.model, **dataclasses.asdict(model_config)).to(device)
        optimizers = optimizer.build_optimizers(model, config)
        if start:
            checkpoint.load_weights(model, start)
            optimizer.load_named_state(optimizers, checkpoint.load_tensors(start / "optimizer.safetensors"))
    if config.dry_run:
        print(metrics.size_of_run(config, model, train_batches.windows, device))
        return

    world = distributed.start(device)
    torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32 on a GPU
    bf16 = config.dtype == "bfloat16" or (config.dtype == "auto" and device.type == "cuda")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    run_model = eval_model = torch.compile(model) if config.compile else model
    if world.world_size > 1:
        run_model = DistributedDataParallel(run_model)

    out = Path(config.out_dir)
    if world.is_main:
        with configurator.one_line_errors():
            log = metrics.RunLog(out, config, settings, state, model, world)
        print(
            f"{config.model}: {model.num_parameters():,} parameters, {'bfloat16' if bf16 else 'float32'} on "
            f"{world.world_size} x {device.type}; run folder {out}\n{train_batches.windows:,} sequences an epoch; "
            f"each leaves out {train_batches.skipped:,} of {len(train_batches.stream):,} tokens, not always the same"
        )
        if config.warmup_steps > config.max_steps:
            print(f"note: warmup_steps={config.warmup_steps} is longer than the run: it ends on the way up")
        if config.compile:
            print("compiling: the first step takes up to a minute or two", flush=True)

    def save(subfolder: str = "") -> Path:
        saved = {"model": config.model, "model_config": dataclasses.asdict(model_config), **state}
        saved |= {"run_config": dataclasses.asdict(config), "corpus": corpus.identity}
        optimizer_state = optimizer.named_state(optimizers)
        return checkpoint.save(out / subfolder, model, optimizer_state, saved, describe(corpus.path))

    batches = micro_batches(config, train_batches, state["step"] + 1, world)
    for step in range(state["step"] + 1, config.max_steps + 1):
        step_start = time.perf_counter()
        lr = optimizer.learning_rate_at(step - 1, config)
        optimizer.set_learning_rate(optimizers, lr)
        with configurator.one_line_errors(DamagedShard):
            loss, grad_norm = train_step(config, run_model, batches, world, autocast)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            kept = save("nonfinite") if world.is_main else None
            distributed.stop(world)
            message = (
                f"train.py: step {step}: loss {loss}, gradient norm {grad_norm}: stopped before the optimizer step; "
                f"the state before it is {kept}; try a lower learning_rate or a longer warmup_steps"
            )
            sys.exit(message if world.is_main else 1)
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=True)
        state["step"], state["seconds"] = step, state["seconds"] + time.perf_counter() - step_start
        if world.is_main:
            log.training_step(state, loss=loss, grad_norm=grad_norm, lr=lr)

        final = step == config.max_steps
        if final or step % config.eval_interval == 0:
            count = config.eval_batches * config.global_batch_size
            windows = val_batches.spread(val_batches.windows if final and config.eval_full else count)
            rows, scored_from = micro_batch_rows(config), corpus.meta.get("scored_from")
            with configurator.one_line_errors(DamagedShard):
                scores = evaluate(eval_model, val_batches, windows, rows, world, autocast, scored_from)
            if world.is_main:
                log.evaluation(state, scores, corpus.bytes_per_token("val"), len(windows), val_batches.windows)
        if world.is_main and (final or step % config.checkpoint_interval == 0):
            path = save()
            checkpoint.remove_old(out, config.keep_last)
            print(f"saved {path}", flush=True)
    if world.is_main:
        log.close()
    distributed.stop(world)


if __name__ == "__main__":
    main()
