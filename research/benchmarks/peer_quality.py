"""`bench.py quality`: compare the final loss with that of GPT-2, implemented in gpt2_peer.py.

All models of a config see the same tokens in the same order, and have the same optimizer and
schedule. Each has its own best learning rate. It is chosen with a separate seed (`SEARCH_SEED`) by
the loss on the first half of the validation sequences, from a grid that grows by factors of two
until the best rate has a worse one on either side. The reported seeds are scored on the other half.
"""

import dataclasses
import math
import time
from argparse import Namespace
from typing import Any, NamedTuple

import torch

from data.loader import prefetched
from model import build
from model.gpt import GPTConfig
from research import compare
from research.benchmarks import gpt2_peer
from research.benchmarks.figures import Figures
from research.benchmarks.suites import BASELINE
from training import distributed, metrics, optimizer
from training.batches import open_data
from training.config import TrainConfig
from training.provenance import compute_digest
from training.settings import configure
from training.validation import evaluate
from utils import tables, units

PEER = "GPT-2"
MODELS = (BASELINE, PEER, "DDL-gpt-mha-rope")
SEARCH_SEED = 1000
# the code that the figures depend on
CODE_FILES = (
    "model/*.py",
    "training/*.py",
    "data/*.py",
    "research/benchmarks/peer_quality.py",
    "research/benchmarks/gpt2_peer.py",
)
# the settings of the config that are stored with the figures
STORED_KEYS = (
    "max_steps",
    "global_batch_size",
    "warmup_steps",
    "schedule",
    "decay_steps",
    "min_lr",
    "weight_decay",
    "beta1",
    "beta2",
    "grad_clip",
    "dtype",
    "compile",
    "dataset",
)
MAX_RATES = 12  # of one model


class Trainer:
    """Trains one model several times, and compiles it once."""

    def __init__(
        self, name: str, config: TrainConfig, model_config: GPTConfig, device: torch.device
    ):
        self.name = name
        self.config = config
        self.model_config = model_config
        self.world = distributed.start(device)
        in_bfloat16 = distributed.computes_in_bfloat16(config.dtype, device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16)
        self.model = self.build_model(SEARCH_SEED).to(device)
        self.call = torch.compile(self.model) if config.compile else self.model

    def build_model(self, seed: int) -> torch.nn.Module:
        """Build the model with the initial weights that train.py gives it with this seed."""
        torch.manual_seed(seed)
        if self.name == PEER:
            return gpt2_peer.GPT2(self.model_config)
        return build(self.name, **dataclasses.asdict(self.model_config))

    def train(self, learning_rate: float, seed: int) -> dict[str, float]:
        """Train the model and return its mean validation losses in nats per token.

        Returns:
            "first" and "second" over the two halves of the validation sequences, "val_loss" over
            both, and the metrics that train.py derives from it
        """
        config = dataclasses.replace(self.config, learning_rate=learning_rate, seed=seed)
        batch_size = config.global_batch_size
        corpus, batches, validation = open_data(config, self.model_config)
        self.model.load_state_dict(self.build_model(seed).state_dict())
        optimizers = optimizer.build_optimizers(self.model, config)
        training_batches = prefetched(
            lambda step: batches.get(step, 0, batch_size),
            range(config.max_steps),
            self.world.device,
        )
        for step, (ids, targets) in enumerate(training_batches):
            optimizer.set_learning_rates(optimizers, step, config)
            with self.autocast:
                _, loss = self.call(ids, targets)
            loss.backward()
            distributed.clip_grad_norm(self.model, config.grad_clip)
            for any_optimizer in optimizers:
                any_optimizer.step()
                any_optimizer.zero_grad(set_to_none=True)

        sequences = list(range(validation.num_sequences))
        half = validation.num_sequences // 2
        losses = []
        for half_sequences in (sequences[:half], sequences[half:]):
            evaluation = evaluate(
                self.call, validation, half_sequences, batch_size, self.world, self.autocast
            )
            losses.append(evaluation["loss"])
        first, second = losses
        # only the last sequence can be shorter, so all of the first half are full
        first_fraction = half * validation.seq_len / (len(validation.tokens) - 1)
        val_loss = first_fraction * first + (1 - first_fraction) * second
        return {
            "first": first,
            "second": second,
            **metrics.compute_validation_metrics(val_loss, corpus.bytes_per_token("val")),
        }


def choose_next_rate(loss_by_rate: dict[float, float], grid: list[float]) -> float | None:
    """Return the rate to try next, or None if the best one has a worse one on either side.

    Raises:
        ValueError: after MAX_RATES rates there is no such best one, or all losses are infinite
    """
    untried = [rate for rate in sorted(grid) if rate not in loss_by_rate]
    if untried:
        return untried[0]
    rates = sorted(loss_by_rate)
    if len(rates) >= MAX_RATES or not any(map(math.isfinite, loss_by_rate.values())):
        raise ValueError(
            f"--rates: none of {', '.join(f'{rate:g}' for rate in rates)} is between two worse ones"
        )
    best = find_best_rate(loss_by_rate)
    if best == rates[0]:
        return best / 2
    if best == rates[-1]:
        return best * 2
    return None


def find_best_rate(loss_by_rate: dict[float, float]) -> float:
    """Return the rate with the lowest finite loss."""

    def get_loss(rate: float) -> float:
        loss = loss_by_rate[rate]
        return loss if math.isfinite(loss) else math.inf

    return min(loss_by_rate, key=get_loss)


class TrainedRun(NamedTuple):
    """The learning rate and the seed of a run."""

    learning_rate: float
    seed: int


def split_rows(
    rows: list[dict[str, Any]], model: str
) -> tuple[dict[float, float], dict[TrainedRun, dict[str, Any]]]:
    """Return the losses of a model's search by rate, and the rows of its reported runs."""
    loss_by_rate = {}
    reported = {}
    for row in rows:
        if row["model"] != model:
            continue
        if row["seed"] == SEARCH_SEED:
            loss_by_rate[row["learning_rate"]] = row["first"]
        else:
            reported[TrainedRun(row["learning_rate"], row["seed"])] = row
    return loss_by_rate, reported


def choose_next_run(
    rows: list[dict[str, Any]], model: str, rates: list[float], num_seeds: int
) -> TrainedRun | None:
    """Return the model's next run, or None if it has all of them."""
    loss_by_rate, reported = split_rows(rows, model)
    rate = choose_next_rate(loss_by_rate, rates)
    if rate is not None:
        return TrainedRun(rate, SEARCH_SEED)
    best = find_best_rate(loss_by_rate)
    for seed in range(num_seeds):
        if TrainedRun(best, seed) not in reported:
            return TrainedRun(best, seed)
    return None


def make_groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each model its best rate and its figures over the reported seeds.

    "against" is the paired difference in "second" to the baseline, with a verdict that is corrected
    for the number of models.
    """
    groups = []
    differences = {}
    loss_by_seed: dict[str, dict[int, float]] = {}
    for model in MODELS:
        loss_by_rate, reported = split_rows(rows, model)
        best_rows = []
        for run in sorted(reported):
            if run.learning_rate == find_best_rate(loss_by_rate):
                best_rows.append(reported[run])
        if not best_rows:
            continue
        loss_by_seed[model] = {row["seed"]: row["second"] for row in best_rows}
        losses = list(loss_by_seed[model].values())
        bits_per_byte = [
            row["second"] * row["val_bits_per_byte"] / row["val_loss"] for row in best_rows
        ]
        groups.append(
            {
                "model": best_rows[0]["model"],
                "parameters": best_rows[0]["parameters"],
                "learning_rate": best_rows[0]["learning_rate"],
                "second": compare.summarize(losses),
                "bits_per_byte": compare.summarize(bits_per_byte),
            }
        )
        baseline = loss_by_seed.get(BASELINE, {})
        if model != BASELINE and loss_by_seed[model].keys() == baseline.keys():
            differences[model] = compare.estimate_paired_difference(losses, list(baseline.values()))
    verdicts = dict(zip(differences, compare.judge_differences(list(differences.values()))))
    for group in groups:
        difference = differences.get(group["model"])
        if difference is not None:
            group["against"] = {
                "mean": difference.mean,
                "ci95": difference.half_width,
                "text": difference.format("+.3f"),
                "verdict": verdicts[group["model"]],
            }
    return groups


def format_table(groups: list[dict[str, Any]]) -> str:
    """Return the groups as a Markdown table."""
    header = [
        "model",
        "parameters",
        "learning rate",
        "loss on the second half",
        "bits per byte",
        f"loss minus that of `{BASELINE}`",
        "verdict",
    ]
    cells = []
    for group in groups:
        against = group.get("against", {})
        cells.append(
            [
                f"`{group['model']}`",
                f"{group['parameters']:,}",
                f"{group['learning_rate']:.3g}",
                compare.estimate_mean(group["second"]["values"]).format(),
                compare.estimate_mean(group["bits_per_byte"]["values"]).format(),
                against.get("text"),
                against.get("verdict"),
            ]
        )
    return tables.format_markdown(header, cells)


def run(args: Namespace) -> None:
    """Print and store the figures of `bench.py quality`; runs that the file has are not repeated."""
    compare.import_special_functions()  # if it is missing, report that before hours of training
    device = distributed.pick_device(args.device)
    configs = {}
    for model in MODELS:
        model_name = BASELINE if model == PEER else model  # GPT-2 has the baseline's settings
        arguments = [str(args.config), f"--model={model_name}", "--optimizer=adamw"]
        configs[model] = configure(arguments, note=lambda _: None)
    config, model_config = configs[BASELINE]
    if config.local_micro_batch_size != config.global_batch_size:
        raise ValueError(
            f"micro_batch_size={config.local_micro_batch_size}: this benchmark needs steps of one "
            "micro-batch; give a config with micro_batch_size=global_batch_size"
        )
    settings = {key: getattr(config, key) for key in STORED_KEYS}
    settings["size"] = dataclasses.asdict(model_config)
    code = compute_digest(*CODE_FILES)[:12]
    figures = Figures(args.json, device, settings, args.resume, code=code)
    for model in MODELS:
        train_missing_runs(model, *configs[model], device, args, figures)
    print(f"\n{format_table(make_groups(figures.rows))}")


def train_missing_runs(
    model: str,
    config: TrainConfig,
    model_config: GPTConfig,
    device: torch.device,
    args: Namespace,
    figures: Figures,
) -> None:
    """Train the runs of a model that have no row yet, and store a row for each."""
    trainer = None
    while next_run := choose_next_run(figures.rows, model, args.rates, args.seeds):
        trainer = trainer or Trainer(model, config, model_config, device)
        start = time.monotonic()
        losses = trainer.train(next_run.learning_rate, next_run.seed)
        row = {
            "model": model,
            "learning_rate": next_run.learning_rate,
            "seed": next_run.seed,
            "parameters": trainer.model.num_parameters(),
            **losses,
            "seconds": time.monotonic() - start,
            "threads": torch.get_num_threads(),
        }
        figures.add(row, "model", "learning_rate", "seed")
        print(
            f"{model} | rate {next_run.learning_rate:.3g} | seed {next_run.seed} | "
            f"first half {row['first']:.4f} | second half {row['second']:.4f} | "
            f"{units.format_duration(row['seconds'])}",
            flush=True,
        )
