"""Quality beside a peer: GPT-2 by its own code (gpt2_peer.py), trained as our models are, each at its best rate.

All models of one config see the same tokens in the same order, by the same optimizer and schedule. The learning rate of
each is chosen on a seed of its own (`SEARCH_SEED`) by the first half of the validation windows, from a grid that grows
by factors of two until its best rate is inside. The seeds that are reported are scored on the other half.
"""

import dataclasses
import math
import time

import torch

import train
from data.loader import prefetched
from evaluation import tables
from model import build
from research import compare
from research.benchmarks import gpt2_peer
from research.benchmarks.figures import Figures
from research.benchmarks.suites import BASELINE
from training import distributed, metrics, optimizer
from training.provenance import digest
from training.validation import evaluate

PEER = "GPT-2"
MODELS = (BASELINE, PEER, "DDL-gpt-mha-rope")
SEARCH_SEED = 1000
CODE = (
    "research/benchmarks/peer_quality.py",
    "model/*.py",
    "research/benchmarks/gpt2_peer.py",
    "training/*.py",
    "data/*.py",
)
KEYS = (
    "max_steps",
    "global_batch_size",
    "warmup_steps",
    "schedule",
    "decay_steps",
    "min_lr",
    "weight_decay",
)
KEYS += ("beta1", "beta2", "grad_clip")
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
        corpus, batches, validation = train.open_data(config, self.model_config)
        self.model.load_state_dict(self.fresh(seed).state_dict())
        optimizers, rows = optimizer.build_optimizers(self.model, config), config.global_batch_size
        made = prefetched(
            lambda step: batches.get(step, 0, rows), range(config.max_steps), self.world.device
        )
        for step, (ids, targets) in enumerate(made):
            optimizer.set_rates(optimizers, step, config)
            with self.autocast:
                _, loss = self.call(ids, targets)
            loss.backward()
            distributed.clip_gradients(self.model, config.grad_clip)
            for each in optimizers:
                each.step()
                each.zero_grad(set_to_none=True)
        windows, half = list(range(validation.windows)), validation.windows // 2
        first, second = (
            evaluate(self.call, validation, part, rows, self.world, self.autocast)["loss"]
            for part in (windows[:half], windows[half:])
        )
        share = (
            half * validation.seq_len / (len(validation.tokens) - 1)
        )  # only the last window may be shorter
        both = metrics.validation_record(
            share * first + (1 - share) * second, corpus.bytes_per_token("val")
        )
        return {"first": first, "second": second, **both}


def next_rate(tried: dict[float, float], grid: list[float]) -> float | None:
    """The rate to try next, from {rate: loss}; None: the best of them has a worse one on either side."""
    if left := [rate for rate in sorted(grid) if rate not in tried]:
        return left[0]
    if len(tried) >= MOST_RATES or not any(map(math.isfinite, tried.values())):
        raise ValueError(
            f"--rates: none of {', '.join(f'{rate:g}' for rate in sorted(tried))} is between two worse ones"
        )
    best, rates = best_rate(tried), sorted(tried)
    if best == rates[0]:
        return best / 2
    return best * 2 if best == rates[-1] else None


def best_rate(tried: dict[float, float]) -> float:
    return min(tried, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)


class Study:
    """The cells of all models, stored as they come; what the file has is not trained again."""

    def __init__(self, args, figures: Figures):
        self.args, self.figures = args, figures
        self.seconds: list[float] = []

    def rows(self, model: str, searching: bool) -> list[dict]:
        return [
            row
            for row in self.figures.rows
            if row["model"] == model and (row["seed"] == SEARCH_SEED) == searching
        ]

    def tried(self, model: str) -> dict[float, float]:
        return {row["learning_rate"]: row["first"] for row in self.rows(model, searching=True)}

    def next_cell(self, model: str) -> tuple[float, int] | None:
        """(learning rate, seed) of the model's next run; None: it has all of them."""
        if (rate := next_rate(self.tried(model), self.args.rates)) is not None:
            return rate, SEARCH_SEED
        rate = best_rate(self.tried(model))
        done = [
            row["seed"] for row in self.rows(model, searching=False) if row["learning_rate"] == rate
        ]
        seed = next((seed for seed in range(self.args.seeds) if seed not in done), None)
        return None if seed is None else (rate, seed)

    def left(self) -> int:
        """Runs to come, if no grid has to grow."""
        rates = [
            rate for model in MODELS for rate in self.args.rates if rate not in self.tried(model)
        ]
        return len(rates) + sum(
            self.args.seeds - len(self.rows(model, searching=False)) for model in MODELS
        )

    def run(self, trainer: Trainer) -> None:
        while cell := self.next_cell(trainer.name):
            begun = time.monotonic()
            row = {"model": trainer.name, "learning_rate": cell[0], "seed": cell[1]}
            row |= {"parameters": trainer.model.num_parameters(), **trainer.train(*cell)}
            self.seconds.append(time.monotonic() - begun)
            row |= {"seconds": self.seconds[-1], "threads": torch.get_num_threads()}
            self.figures.add(row, "model", "learning_rate", "seed")
            eta = metrics.duration(self.left() * sum(self.seconds) / len(self.seconds))
            print(f"{row['model']} | rate {cell[0]:.3g} | seed {cell[1]} | first half {row['first']:.4f} | second half "
                  f"{row['second']:.4f} | {metrics.duration(self.seconds[-1])} | ETA {eta}", flush=True)  # fmt: skip


def groups_of(rows: list[dict]) -> list[dict]:
    """A group for each model: its best rate, its figures over the seeds that are reported, and "against", its paired
    difference in "second" to the baseline where both have the seeds, and a word, corrected for the number of models."""
    tried: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["seed"] == SEARCH_SEED:
            tried.setdefault(row["model"], {})[row["learning_rate"]] = row["first"]
    by_model: dict[str, dict[int, dict]] = {}
    for row in rows:
        if row["seed"] != SEARCH_SEED and row["learning_rate"] == best_rate(tried[row["model"]]):
            by_model.setdefault(row["model"], {})[row["seed"]] = row
    groups, differences = [], {}
    for model, runs in by_model.items():
        group = {
            key: next(iter(runs.values()))[key] for key in ("model", "parameters", "learning_rate")
        }
        own = [runs[seed] for seed in sorted(runs)]
        figures = {"second": [row["second"] for row in own]}
        figures["bits_per_byte"] = [
            row["second"] * row["val_bits_per_byte"] / row["val_loss"] for row in own
        ]
        groups.append(group | {key: compare.summary(values) for key, values in figures.items()})
        base = by_model.get(BASELINE, {})
        if model != BASELINE and runs.keys() == base.keys():
            differences[model] = compare.paired(
                figures["second"], [base[seed]["second"] for seed in sorted(base)]
            )
    words = dict(zip(differences, compare.verdicts(list(differences.values()))))
    for group in (group for group in groups if group["model"] in words):
        estimate = differences[group["model"]]
        group["against"] = {
            "mean": estimate.mean,
            "ci95": estimate.half,
            "text": estimate.text("+.3f"),
        }
        group["against"]["verdict"] = words[group["model"]]
    return groups


def markdown(groups: list[dict]) -> str:
    header = ("model", "parameters", "learning rate", "loss on the second half", "bits per byte",
              f"loss less that of `{BASELINE}`", "that is")  # fmt: skip
    cells = []
    for group in groups:
        means = (
            compare.interval(group[key]["values"]).text() for key in ("second", "bits_per_byte")
        )
        against = (group.get("against", {}).get(key) for key in ("text", "verdict"))
        cells.append(
            (
                f"`{group['model']}`",
                f"{group['parameters']:,}",
                f"{group['learning_rate']:g}",
                *means,
                *against,
            )
        )
    return tables.markdown(header, cells)


def run(args) -> None:
    """Print and store the figures of `bench.py peers`."""
    compare.student()  # missing, it should not be found at the end
    device = distributed.pick_device(args.device)
    parsed = {}
    for model in MODELS:  # GPT-2 has the sizes and the settings of the baseline
        stem = BASELINE if model == PEER else model
        parsed[model] = train.configure(
            [str(args.config), f"--model={stem}", "--optimizer=adamw"], note=lambda _: None
        )
    config, model_config = parsed[BASELINE]
    if config.rows != config.global_batch_size:
        raise ValueError(
            f"micro_batch_size={config.rows}: here a step is one micro-batch; give a config with one"
        )
    settings = {key: getattr(config, key) for key in (*KEYS, "dtype", "compile", "dataset")}
    settings["size"] = dataclasses.asdict(model_config)
    figures = Figures(args.json, device, settings, args.resume, code=digest(*CODE)[:12])
    study = Study(args, figures)
    for model in MODELS:
        if study.next_cell(model):
            study.run(Trainer(model, *parsed[model], device))
    print(f"\n{markdown(groups_of(figures.rows))}")
