"""The rules of the track: the tier, its entries, and which runs an entry needs next.

research/track.md says them in words. research/track.py trains the runs and compares the entries.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import configurator
from configurator import collect_options
from huggingface.released import FORM_OF_RELEASED_CODE
from model import model_class
from research import sweep
from research.track_statistics import Noise
from research.tuning import (
    Point,
    Search,
    find_minimum,
    follow_cross,
    has_converged,
    to_rate,
)
from utils import files
from utils.provenance import ROOT

RATES = ("muon_learning_rate", "learning_rate")
# what config/authors.py sets, where a model has the key
RELEASED_FORM = {**FORM_OF_RELEASED_CODE, "ddl_state_conv_init": "mean"}


# What the tier cpu-1 leaves to the defaults of train.py, as they were when it was frozen. Keys that
# change no weight are not among them; a key that is newer than the tier, or that the code no longer
# has, shows in the first losses.
CPU_1_DEFAULTS = {
    "init_from": None,
    "muon_dtype": None,
    "embedding_learning_rate": None,
    "min_lr": None,
    "schedule": "cosine",
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "skip_nonfinite": 0,
    "intermediate_size": None,
    "rope_base": 10000.0,
    "rope_ratio": 1.0,
    "state_dtype": "bfloat16",
    "use_qk_rmsnorm": True,
    "tie_embeddings": True,
    "embedding_init_std": 0.02,
    "init": "spectral",
    "hidden_init_std_factor": 0.5,
    "residual_branch_mult": None,
    "mup": False,
    "hidden_size_base": 1024,
}


@dataclass(frozen=True)
class Tier:
    """The rules that all entries of a table have in common; none changes after the first entry.

    settings_sha256: of what the config file sets. defaults: of the keys that it does not set, for the
    baseline. corpus_sha256: of the token files. short_steps and long_steps: of the runs that search
    for two rates, and of all others. factor: of both rates, from which the search in longer runs
    starts. Counts of tries are the largest ones. noise and quantile: estimated once from the
    baseline's runs (estimate_noise). root: where runs and results are stored.
    """

    name: str
    config: Path
    settings_sha256: str
    defaults: dict[str, Any]
    corpus_sha256: dict[str, str]
    torch_version: str
    baseline: str = "gpt-mha-rope"
    short_steps: int = 800
    long_steps: int = 3200
    max_short_tries: int = 8
    max_long_tries: int = 5
    factor: float = 0.5
    num_seeds: int = 4
    num_baseline_seeds: int = 12
    tuning_seed: int = 1000
    noise: Noise | None = None
    quantile: float = math.nan
    corpus: Path = ROOT / "data" / "torch_source"
    root: Path = ROOT

    @property
    def results(self) -> Path:
        """The folder of the stored entries."""
        return self.root / "results" / "track" / self.name

    def read_settings(self) -> dict[str, Any]:
        """Return what the config file sets, without what only changes the rounding."""
        settings = configurator.read_config_files(self.config)
        settings.pop("compile", None)
        return settings


CPU_1 = Tier(
    name="cpu-1",
    config=ROOT / "config" / "track_cpu_1.py",
    settings_sha256="18e261e73dc3ef9be0379ff2ccfd0365da9fa9d3a3716677f4f8c41e2365e56b",
    defaults=CPU_1_DEFAULTS,
    corpus_sha256={
        "torch_val_000000.bin": "0abb3c47a8f0007235dc42cc1177ed22228a8717803f2539a43ea7fcecd8b14f",
        "torch_train_000001.bin": (
            "f78d12ba7d5a66e831a14b70841010771ffc1b4acae83716799f82dd43daa715"
        ),
    },
    torch_version="2.13.0",
    noise=Noise(sigma=0.008032, sigma_df=11, tau=0.003941, tau_df=7, num_baseline_seeds=12),
    quantile=3.715,
)


class Run(NamedTuple):
    """A run of the plan: what it is for, its seed, its length in steps and its rates."""

    part: Literal["short", "long", "seed"]
    seed: int
    steps: int
    muon_learning_rate: float
    learning_rate: float


@dataclass(frozen=True)
class Entry:
    """An entry of a tier: a variant with values of its keys, and the seeds of its runs."""

    tier: Tier
    model: str
    keys: dict[str, Any]
    first_seed: int = 0

    @property
    def name(self) -> str:
        """The name of the entry's file."""
        keys = dict(self.keys)
        if self.first_seed:
            keys["first_seed"] = self.first_seed
        return "+".join([self.model, *([sweep.make_cell_name(keys)] if keys else [])])

    @property
    def label(self) -> str:
        """The name of the entry in the table and the figure."""
        options = collect_options(model_class(self.model).Config)
        form = {
            key: value
            for key, value in RELEASED_FORM.items()
            if key in options and key not in self.tier.defaults and value != options[key].default
        }
        if form and self.keys == form and not self.first_seed:
            return f"{self.model} (released code's form)"
        return self.name

    @property
    def path(self) -> Path:
        """The file of the entry's results."""
        return self.tier.results / f"{self.name}.json"

    @property
    def folder(self) -> Path:
        """The folder of the entry's runs."""
        return self.tier.root / "sweeps" / "track" / self.tier.name / self.name

    @property
    def seeds(self) -> range:
        """The seeds of the runs that are reported."""
        is_baseline = self.name == self.tier.baseline
        num_seeds = self.tier.num_baseline_seeds if is_baseline else self.tier.num_seeds
        return range(self.first_seed, self.first_seed + num_seeds)

    @property
    def tuning_seed(self) -> int:
        """The seed of the searches for rates."""
        return self.tier.tuning_seed + self.first_seed


def get_baseline(tier: Tier) -> Entry:
    """Return the entry with which all others of a tier are compared."""
    return Entry(tier, tier.baseline, keys={})


class Plan(NamedTuple):
    """What an entry's finished runs say about the others.

    missing: runs that can begin now, the most important first. steps_left: of these and of all later
    ones, if no search needs more tries. rates: those of the seeds, once they are known.
    """

    missing: list[Run]
    steps_left: int
    rates: dict[str, float] | None


def make_short_run(entry: Entry, point: Point) -> Run:
    """Return the run of the search for two rates at a point."""
    settings = entry.tier.read_settings()
    rates = {key: to_rate(settings[key], power) for key, power in zip(RATES, point)}
    return Run("short", entry.tuning_seed, entry.tier.short_steps, **rates)


def make_long_run(entry: Entry, rates: dict[str, float], point: Point) -> Run:
    """Return the run of the search for a common factor of two rates at a point."""
    power = math.log2(entry.tier.factor) + point[0]
    scaled = {key: to_rate(rate, power) for key, rate in rates.items()}
    return Run("long", entry.tuning_seed, entry.tier.long_steps, **scaled)


def make_plan(entry: Entry, losses: dict[Run, float]) -> Plan:
    """Return which runs an entry needs next.

    The stages are the search for two rates, that for a common factor, and the seeds.

    Args:
        losses: of the finished runs; infinity of those that diverged

    Raises:
        ValueError: all tries of a search diverged
    """
    tier = entry.tier
    seed_steps = len(entry.seeds) * tier.long_steps
    short = follow_cross(
        lambda point: losses.get(make_short_run(entry, point)),
        num_rates=2,
        max_tries=tier.max_short_tries,
    )
    if short.missing:
        runs = [make_short_run(entry, point) for point in short.missing]
        steps_left = len(runs) * tier.short_steps + 3 * tier.long_steps + seed_steps
        return Plan(runs, steps_left, rates=None)
    check_converged(entry, short)
    short_rates = get_rates(make_short_run(entry, find_minimum(short.losses)))

    long = follow_cross(
        lambda point: losses.get(make_long_run(entry, short_rates, point)),
        num_rates=1,
        max_tries=tier.max_long_tries,
    )
    if long.missing:
        runs = [make_long_run(entry, short_rates, point) for point in long.missing]
        return Plan(runs, len(runs) * tier.long_steps + seed_steps, rates=None)
    check_converged(entry, long)
    best = make_long_run(entry, short_rates, find_minimum(long.losses))

    runs = [best._replace(part="seed", seed=seed) for seed in entry.seeds]
    missing = [run for run in runs if run not in losses]
    return Plan(missing, len(missing) * tier.long_steps, get_rates(best))


def get_rates(run: Run) -> dict[str, float]:
    """Return the two rates of a run."""
    return {key: getattr(run, key) for key in RATES}


def check_converged(entry: Entry, search: Search) -> None:
    """Raise ValueError if all tries of a search diverged."""
    if not has_converged(search.losses):
        raise ValueError(
            f"{entry.name}: all {len(search.losses)} tries of a search for rates diverged, so it has "
            "no place in the table; lower what the stream multiplies its state by"
        )


# ---- stored entries ----


def read_losses(stored: dict) -> dict[Run, float]:
    """Return the losses of an entry's stored runs; infinity of those that diverged."""
    losses = {}
    for row in stored.get("runs", []):
        run = Run(**{key: row[key] for key in Run._fields})
        losses[run] = math.inf if row["val_loss"] is None else row["val_loss"]
    return losses


def read_entry(entry: Entry) -> dict:
    """Return what is stored of an entry, or what a new one begins with."""
    if entry.path.exists():
        return files.read_json(entry.path)
    return {
        "tier": entry.tier.name,
        "model": entry.model,
        "keys": entry.keys,
        "first_seed": entry.first_seed,
        "runs": [],
    }


def write_entry(entry: Entry, stored: dict) -> None:
    """Write what is stored of an entry."""
    entry.path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(entry.path, stored)
