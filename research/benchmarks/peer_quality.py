"""Quality beside a peer: GPT-2 by its own code (gpt2_peer.py), trained as our models are, each at its best rate.

All models of one config see the same tokens in the same order, by the same optimizer and schedule.
The learning rate of each is chosen on a seed of its own (`SEARCH_SEED`) by the first half of the
validation windows, from a grid that grows by factors of two until its best rate is inside. The seeds
that are reported are scored on the other half.
"""

import dataclasses
import math
import time

import torch

from data.loader import prefetched
from model import build
from research import compare
from research.benchmarks import gpt2_peer
from research.benchmarks.figures import Figures
from research.benchmarks.suites import BASELINE
from training import distributed, metrics, optimizer
from training.provenance import compute_digest
from training.settings import configure
from training.setup import open_data
from training.validation import evaluate
from utils import tables, units

PEER = "GPT-2"
MODELS = (BASELINE, PEER, "DDL-gpt-mha-rope")
SEARCH_SEED = 1000
CODE = "model/*.py", "training/*.py", "data/*.py"
CODE += "research/benchmarks/peer_quality.py", "research/benchmarks/gpt2_peer.py"
KEYS = "max_steps global_batch_size warmup_steps schedule decay_steps min_lr weight_decay"
KEYS = (*KEYS.split(), "beta1", "beta2", "grad_clip", "dtype", "compile", "dataset")
MOST_RATES = 12  # of one model


class Trainer:
    """Trains one model again and again, compiled once."""

    def __init__(self, name: str, config, model_config, device: torch.device):
        self.name, self.config, self.model_config = name, config, model_config
        self.world = distributed.start(device)
        bf16 = distributed.computes_in_bfloat16(config.dtype, device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        self.model = self.fresh(SEARCH_SEED).to(device)
        self.call = torch.compile(self.model) if config.compile else self.model

    def fresh(self, seed: int):
        """The model as train.py starts it with this seed."""
        torch.manual_seed(seed)
        if self.name == PEER:
            return gpt2_peer.GPT2(self.model_config)
        return build(self.name, **dataclasses.asdict(self.model_config))

    def train(self, learning_rate: float, seed: int) -> dict:
        """Mean losses in nats per token: "first" and "second" over either half of the validation windows, "val_loss"
        (and what goes with it in metrics.jsonl) over both."""
        config = dataclasses.replace(self.config, learning_rate=learning_rate, seed=seed)
        corpus, batches, validation = open_data(config, self.model_config)
        self.model.load_state_dict(self.fresh(seed).state_dict())
        optimizers, rows = optimizer.build_optimizers(self.model, config), config.global_batch_size
        made = prefetched(
            lambda step: batches.get(step, 0, rows), range(config.max_steps), self.world.device
        )
        for step, (ids, targets) in enumerate(made):
            optimizer.set_learning_rates(optimizers, step, config)
            with self.autocast:
                _, loss = self.call(ids, targets)
            loss.backward()
            distributed.clip_grad_norm(self.model, config.grad_clip)
            for each in optimizers:
                each.step()
                each.zero_grad(set_to_none=True)
        windows, half = list(range(validation.num_sequences)), validation.num_sequences // 2
        first, second = (
            evaluate(self.call, validation, part, rows, self.world, self.autocast)["loss"]
            for part in (windows[:half], windows[half:])
        )
        share = (
            half * validation.seq_len / (len(validation.tokens) - 1)
        )  # only the last window may be shorter
        both = metrics.compute_validation_metrics(
            share * first + (1 - share) * second, corpus.bytes_per_token("val")
        )
        return {"first": first, "second": second, **both}


def next_rate(tried: dict[float, float], grid: list[float]) -> float | None:
    """The rate to try next, from {rate: loss}; None: the best has a worse one on either side."""
    if left := [rate for rate in sorted(grid) if rate not in tried]:
        return left[0]
    rates = sorted(tried)
    if len(tried) >= MOST_RATES or not any(map(math.isfinite, tried.values())):
        shown = ", ".join(f"{rate:g}" for rate in rates)
        raise ValueError(f"--rates: none of {shown} is between two worse ones")
    best = best_rate(tried)
    if best == rates[0]:
        return best / 2
    return best * 2 if best == rates[-1] else None


def best_rate(tried: dict[float, float]) -> float:
    return min(tried, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)


def rows_of(rows: list[dict], model: str) -> tuple[dict[float, float], dict[tuple, dict]]:
    """Of a model {rate: loss} of its search, and {(rate, seed): row} of what is reported."""
    own = [row for row in rows if row["model"] == model]
    tried = {r["learning_rate"]: r["first"] for r in own if r["seed"] == SEARCH_SEED}
    found = {(r["learning_rate"], r["seed"]): r for r in own if r["seed"] != SEARCH_SEED}
    return tried, found


def next_cell(rows: list[dict], model: str, args) -> tuple[float, int] | None:
    """(learning rate, seed) of the model's next run; None: it has all of them."""
    tried, found = rows_of(rows, model)
    if (rate := next_rate(tried, args.rates)) is not None:
        return rate, SEARCH_SEED
    best = best_rate(tried)
    left = [seed for seed in range(args.seeds) if (best, seed) not in found]
    return (best, left[0]) if left else None


def groups_of(rows: list[dict]) -> list[dict]:
    """A group for each model: its best rate, its figures over the seeds that are reported, and
    "against", its paired difference in "second" to the baseline, and a word (Holm)."""
    groups, differences, losses = [], {}, {}
    for model in MODELS:
        tried, found = rows_of(rows, model)
        own = [found[key] for key in sorted(found) if key[0] == best_rate(tried)]
        if not own:
            continue
        group = {key: own[0][key] for key in ("model", "parameters", "learning_rate")}
        losses[model] = {row["seed"]: row["second"] for row in own}
        bits = [row["second"] * row["val_bits_per_byte"] / row["val_loss"] for row in own]
        group |= {"second": compare.summarize(list(losses[model].values()))}
        groups.append(group | {"bits_per_byte": compare.summarize(bits)})
        base = losses.get(BASELINE, {})
        if model != BASELINE and losses[model].keys() == base.keys():
            differences[model] = compare.estimate_paired_difference(
                [*losses[model].values()], [*base.values()]
            )
    words = dict(zip(differences, compare.judge_differences(list(differences.values()))))
    for group in groups:
        if (estimate := differences.get(group["model"])) is not None:
            found = {
                "mean": estimate.mean,
                "ci95": estimate.half_width,
                "text": estimate.format("+.3f"),
            }
            group["against"] = found | {"verdict": words[group["model"]]}
    return groups


def markdown(groups: list[dict]) -> str:
    header = ["model", "parameters", "learning rate", "loss on the second half", "bits per byte"]
    cells = []
    for group in groups:
        figures = [group[key]["values"] for key in ("second", "bits_per_byte")]
        means = [compare.estimate_mean(values).format() for values in figures]
        against = [group.get("against", {}).get(key) for key in ("text", "verdict")]
        about = [f"`{group['model']}`", f"{group['parameters']:,}", f"{group['learning_rate']:.3g}"]
        cells.append([*about, *means, *against])
    return tables.format_markdown([*header, f"loss less that of `{BASELINE}`", "that is"], cells)


def run(args) -> None:
    """Print and store the figures of `bench.py quality`; what the file has is not trained again."""
    compare.import_special_functions()  # missing, it should not be found at the end
    device, parsed = distributed.pick_device(args.device), {}
    for model in MODELS:  # GPT-2 has the sizes and the settings of the baseline
        given = [f"--model={BASELINE if model == PEER else model}", "--optimizer=adamw"]
        parsed[model] = configure([str(args.config), *given], note=lambda _: None)
    config, model_config = parsed[BASELINE]
    if config.local_micro_batch_size != config.global_batch_size:
        fix = "here a step is one micro-batch; give a config with one"
        raise ValueError(f"micro_batch_size={config.local_micro_batch_size}: {fix}")
    settings = {key: getattr(config, key) for key in KEYS}
    settings["size"] = dataclasses.asdict(model_config)
    figures = Figures(args.json, device, settings, args.resume, code=compute_digest(*CODE)[:12])
    for model in MODELS:
        trainer = None
        while cell := next_cell(figures.rows, model, args):
            trainer = trainer or Trainer(model, *parsed[model], device)
            begun = time.monotonic()
            row = {"model": model, "learning_rate": cell[0], "seed": cell[1]}
            row |= {"parameters": trainer.model.num_parameters(), **trainer.train(*cell)}
            row |= {"seconds": time.monotonic() - begun, "threads": torch.get_num_threads()}
            figures.add(row, "model", "learning_rate", "seed")
            halves = f"first half {row['first']:.4f} | second half {row['second']:.4f}"
            took = units.format_duration(row["seconds"])
            print(f"{model} | rate {cell[0]:.3g} | seed {cell[1]} | {halves} | {took}", flush=True)
    print(f"\n{markdown(groups_of(figures.rows))}")
