"""Say where a residual stream stands: tune its rates, train its seeds, and compare it with the others.

    python research/track.py my-gpt-mha-rope              # half an hour to an hour on two cores; resumes
    python research/track.py my-gpt-mha-rope --mode=show  # print the plan and its time, run nothing
    python research/track.py                              # print the table of all stored entries
    python research/track.py --mode=table --out=cpu-1.png # and draw it

The command checks the variant, and then trains it by the rules of the tier cpu-1, which every entry
has in common (research/track.md): five to eight tries for its two rates, three to five for a common
factor of both in longer runs, and four seeds with these rates. The difference from the additive
stream decides the verdict. A key of the variant, --key=value, makes another entry. Every finished
run is stored in results/track/cpu-1/<entry>.json; the runs are in sweeps/track/cpu-1/<entry>/.
"""

import dataclasses
import hashlib
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import configurator
import model as models
from configurator import collect_options, option
from model.causality import find_leak, move_parameters
from model.cost import flops_per_token
from research import plots, sweep
from research.benchmarks import timing
from research.benchmarks.models import Contender
from research.track_plan import (
    CPU_1,
    Entry,
    Run,
    Tier,
    get_baseline,
    make_plan,
    read_entry,
    read_losses,
    write_entry,
)
from research.track_statistics import (
    compute_error_with_own_sigma,
    judge,
)
from training import metrics
from training.config import TrainConfig
from training.settings import Arguments
from utils import errors, files, provenance, units

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# steps of a run with a fixed seed and high rates, whose losses tell whether code computes the same
FIRST_STEPS = 20
# of these losses, between machines
LOSS_TOLERANCE = 1e-3
# steps of the entry and of the baseline in turns, whose times give the speed
SPEED_ROUNDS = 40
# of the model whose tokens must not see later ones
TINY = {
    "vocab_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
}
# entries that the table names even if they were not run
LISTED_ENTRIES = (
    "wide-gpt-mha-rope",
    "conv-gpt-mha-rope",
    "DDL-gpt-mha-rope",
    "DDL-gpt-mha-rope-CC-EC",
    "DDL-vdim1-gpt-mha-rope",
    "mHC-gpt-mha-rope",
    "AttnRes-gpt-mha-rope",
    "MuseSpark-gpt-mha-rope",
    "MUDD-gpt-mha-rope",
    "Lambdas-gpt-mha-rope",
)


@dataclass
class Options:
    """Keys of the track; the keys of the variant are options as well."""

    mode: Literal["run", "show", "table"] = option(
        "run",
        "run what is missing, then print the table (run); print the plan and its time (show); or "
        "print the table of what is stored (table)",
    )
    out: str | None = option(
        None,
        "file for a figure of the table's differences (.png, .svg or .pdf)",
    )
    jobs: int = option(2, "number of runs at the same time, each with one thread", low=1)
    first_seed: int = option(
        0,
        "first seed; an entry with other seeds is another entry",
        low=0,
        high=900,
    )


# ---- checks ----


def hash_settings(settings: dict[str, Any]) -> str:
    """Return the SHA-256 of settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def check_tier(tier: Tier) -> None:
    """Raise ValueError if this machine does not have what all entries of the tier had."""
    if hash_settings(tier.read_settings()) != tier.settings_sha256:
        raise ValueError(
            f"{tier.config} differs from the tier {tier.name}, which never changes; restore the "
            "file with git checkout"
        )
    options = collect_options(TrainConfig, models.model_class(tier.baseline).Config)
    for key, default in tier.defaults.items():
        if key in options and options[key].default != default:
            raise ValueError(
                f"the default of {key} is no longer {default}, with which all entries of the tier "
                f"{tier.name} were trained; restore it"
            )
    version = torch.__version__.partition("+")[0]
    if version != tier.torch_version:
        raise ValueError(
            f"torch is {version}, but the tier {tier.name} is of torch {tier.torch_version}, whose "
            f"source is its text; pip install torch=={tier.torch_version}"
        )
    prepare = tier.corpus / "prepare.py"
    if not (tier.corpus / "meta.json").exists():
        subprocess.run([sys.executable, str(prepare)], check=True)
    for name, digest in tier.corpus_sha256.items():
        file = tier.corpus / name
        if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise ValueError(
                f"{file} is not the text of the tier {tier.name}; run {prepare} --overwrite, and if "
                "this line stays, your installation of torch has other files"
            )


def check_causality(entry: Entry) -> None:
    """Raise ValueError if a tiny model of the variant lets a token see a later one."""
    config = models.make_config(entry.model, {**TINY, **entry.keys})
    torch.manual_seed(0)
    tiny = move_parameters(models.build(entry.model, config)).double().eval()
    ids = torch.randint(TINY["vocab_size"], (1, 16), generator=torch.Generator().manual_seed(0))
    leak = find_leak(tiny, ids)
    if leak is not None:
        raise ValueError(
            f"{entry.model} has no place in the table, because later tokens leak: {leak}"
        )


def build_model(entry: Entry, device: str) -> torch.nn.Module:
    """Return a model of an entry in the size of its tier."""
    settings = entry.tier.read_settings()
    options = collect_options(models.model_class(entry.model).Config)
    sizes = {key: value for key, value in settings.items() if key in options}
    config = models.make_config(entry.model, {**sizes, **entry.keys})
    with torch.device(device):
        return models.build(entry.model, config)


def measure_size(entry: Entry) -> dict[str, int]:
    """Return the number of parameters of an entry and its training FLOPs per token."""
    built = build_model(entry, "meta")
    return {"parameters": built.num_parameters(), "flops_per_token": flops_per_token(built)}


def measure_speed(entry: Entry) -> dict[str, float | str | None]:
    """Return the training speed of an entry relative to the baseline's, and the machine.

    The two take turns with steps of one batch (forward, backward, AdamW), compiled as in training,
    with one thread. Every round gives a ratio; returned are their median and the 10th and 90th
    percentile.
    """
    settings = entry.tier.read_settings()
    shape = (2, settings["micro_batch_size"], settings["block_size"])
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(settings["vocab_size"], shape, generator=generator)
    torch.set_num_threads(1)
    contenders = {
        name: Contender(
            name,
            build_model(member, "cpu"),
            batch=batch.unbind(),
            device=torch.device("cpu"),
            dtype=torch.float32,
            compiled=configurator.read_config_files(entry.tier.config)["compile"],
        )
        for name, member in {"baseline": get_baseline(entry.tier), "entry": entry}.items()
    }
    turns = {name: contender.train for name, contender in contenders.items()}
    seconds = timing.measure(turns, warmup=3, rounds=SPEED_ROUNDS)
    ratios = timing.compute_speed_ratios("relative", seconds["baseline"], seconds["entry"])
    return {**ratios, **provenance.describe_machine()}


def measure_first_losses(entry: Entry, model: str, keys: dict[str, Any]) -> list[float]:
    """Return the losses of a few steps with high rates and a fixed seed, which depend on all code."""
    folder = entry.folder / f"first_steps_of_{model}"
    shutil.rmtree(folder, ignore_errors=True)
    run = Run("short", entry.tier.tuning_seed, FIRST_STEPS, 7e-3, 2e-2)
    cell = make_cell(
        dataclasses.replace(entry, model=model, keys=keys),
        run,
        folder,
        warmup_steps=2,
        compile=False,
        eval_full=False,
        eval_batches=1,
    )
    exit_code, last_line = sweep.run_cell(cell, 1, [], sweep.make_environment(1))
    has_diverged = sweep.read_loss(cell) == math.inf  # which lower rates may mend
    if exit_code and not has_diverged:
        raise ValueError(f"{model} does not train ({cell.log}): {last_line}")
    records = metrics.read(cell.folder / "metrics.jsonl")
    return [record["loss"] for record in records if "loss" in record]


def check_code(entry: Entry, stored: dict) -> None:
    """Store the first losses of a new entry, or compare them with those of its stored runs.

    Raises:
        ValueError: the code computes other losses than that of the stored runs
    """
    baseline = entry.tier.baseline
    # the baseline first: if its losses differ, so do those of the variant
    first_losses = {
        "baseline": measure_first_losses(entry, baseline, {}),
        "own": measure_first_losses(entry, entry.model, entry.keys),
    }
    if "code" not in stored:
        stored["code"] = {"first_losses": first_losses}
    for name, losses in first_losses.items():
        if not have_same_losses(losses, stored["code"]["first_losses"][name]):
            changed = models.describe_file(entry.model) if name == "own" else "the code of training"
            raise ValueError(
                f"{changed} computes other losses than when the runs of {entry.path} were stored; "
                "give the file another name, which makes another entry, or delete the stored runs "
                f"and {entry.folder}"
            )


def have_same_losses(losses: list[float], others: list[float]) -> bool:
    """Return whether two lists of first losses are the same but for rounding."""
    return len(losses) == len(others) and all(
        math.isclose(loss, other, rel_tol=LOSS_TOLERANCE) for loss, other in zip(losses, others)
    )


# ---- running ----


def make_cell(entry: Entry, run: Run, folder: Path, **changes: Any) -> sweep.Cell:
    """Return the cell of the sweep that trains a run below a folder.

    Raises:
        ValueError: train.py would refuse its arguments
    """
    texts = {
        "seed": run.seed,
        "max_steps": run.steps,
        "warmup_steps": run.steps // 10,
        "muon_learning_rate": run.muon_learning_rate,
        "learning_rate": run.learning_rate,
        # rates are chosen on one part of the text, and losses reported on the other
        "eval_part": "second" if run.part == "seed" else "first",
        **changes,
    }
    arguments = Arguments(
        files=(str(entry.tier.config),),
        from_files=configurator.read_config_files(entry.tier.config),
        from_command_line={
            key: str(value) for key, value in {**entry.keys, "model": entry.model}.items()
        },
    )
    return sweep.make_cell(0, {key: str(value) for key, value in texts.items()}, arguments, folder)


class Runner:
    """Trains the missing runs of an entry, and stores each of them when it is finished."""

    def __init__(self, entry: Entry, stored: dict, jobs: int):
        self.entry = entry
        self.stored = stored
        self.losses = read_losses(stored)
        self.jobs = jobs
        self.signals = sweep.catch_signals()
        self.environment = sweep.make_environment(jobs)

    def train(self, run: Run) -> dict | None:
        """Train a run and return its row, or None if a signal stopped it.

        Raises:
            ValueError: train.py failed, but not because the run diverged
        """
        cell = make_cell(self.entry, run, self.entry.folder)
        sweep.check_cell_folder(cell)
        last_line = ""
        if sweep.read_loss(cell) is None:
            _, last_line = sweep.run_cell(cell, 1, self.signals, self.environment)
        loss = sweep.read_loss(cell)
        if loss is None:
            if self.signals:
                return None
            raise ValueError(f"{cell.log}: {last_line}")
        records = metrics.read(cell.folder / "metrics.jsonl")
        return {
            **run._asdict(),
            "val_loss": loss,
            # a run that diverges in its first step logs nothing
            "seconds": round(records[-1]["seconds"], 1) if records else 0.0,
            "commit": provenance.current_commit(),
            **provenance.describe_machine(),
        }

    def run_all(self) -> None:
        """Train all missing runs, `jobs` at the same time, until a signal stops them.

        Raises:
            ValueError: a run failed; those that had begun are finished first
        """

        def list_missing() -> list[Run]:
            return [] if self.signals else make_plan(self.entry, self.losses).missing

        sweep.run_missing(list_missing, self.train, self.store, self.jobs)

    def store(self, run: Run, row: dict | None) -> None:
        """Store the row of a finished run, and print a line about it; None is that of a stopped run."""
        if row is None:
            return
        self.losses[run] = row["val_loss"]
        self.stored["runs"].append(row)
        write_entry(self.entry, self.stored)
        rows = self.stored["runs"]
        step_seconds = sum(row["seconds"] for row in rows) / sum(row["steps"] for row in rows)
        steps_left = make_plan(self.entry, self.losses).steps_left
        seconds_left = step_seconds * steps_left / self.jobs
        print(
            f"{self.entry.name} | {describe(run)} | {format_loss(row['val_loss'])} | "
            f"{units.format_duration(row['seconds'])} | "
            f"about {units.format_duration(seconds_left)} left",
            flush=True,
        )


def describe(run: Run) -> str:
    """Return a run in words."""
    return (
        f"{run.part}, seed {run.seed}, {run.steps} steps, rates {run.muon_learning_rate:g} and "
        f"{run.learning_rate:g}"
    )


def format_loss(loss: float) -> str:
    """Return what to print about the loss of a run."""
    return f"loss {loss:.4f}" if math.isfinite(loss) else "diverged"


# ---- time and table ----


def estimate_seconds(entry: Entry, num_steps: int, jobs: int) -> float | None:
    """Estimate the time of some steps of an entry from the baseline's rows and the entry's speed.

    If the speed has not been measured, FLOPs stand for it.
    """
    baseline = read_entry(get_baseline(entry.tier))
    if not baseline["runs"]:
        return None
    seconds = statistics.median(row["seconds"] / row["steps"] for row in baseline["runs"])
    stored = read_entry(entry)
    if "speed" in stored:
        relative_seconds = 1 / stored["speed"]["relative"]
    else:
        relative_seconds = measure_size(entry)["flops_per_token"] / baseline["flops_per_token"]
    return num_steps * seconds * relative_seconds / jobs


def show_plan(entry: Entry, jobs: int) -> None:
    """Print which runs of an entry are finished, which come next, and how long all take."""
    losses = read_losses(read_entry(entry))
    plan = make_plan(entry, losses)
    for run, loss in losses.items():
        print(f"done: {describe(run)}: {format_loss(loss)}")
    for run in plan.missing:
        print(f"next: {describe(run)}")
    seconds = estimate_seconds(entry, plan.steps_left, jobs)
    duration = "unknown, because no run of the baseline is stored"
    if seconds is not None:
        duration = (
            f"about {units.format_duration(seconds)} with --jobs={jobs}, by the time of the "
            "baseline's stored runs and the speed of the variant (its FLOPs until that is measured)"
        )
    print(
        f"{entry.name}: {len(losses)} runs are done, {plan.steps_left} steps are left (more if a "
        f"search moves); time: {duration}"
    )


def make_row(stored: dict, tier: Tier, baseline: dict) -> dict[str, Any]:
    """Return the numbers of a stored entry in the table; its loss is None until it is complete."""
    entry = Entry(tier, stored["model"], stored["keys"], stored["first_seed"])
    losses = read_losses(stored)
    reported = [loss for run, loss in losses.items() if run.part == "seed"]
    short_losses = [
        loss
        for run, loss in losses.items()
        if run.part == "short" and run.seed == entry.tuning_seed
    ]
    row = {
        "entry": entry.label,
        "name": entry.name,
        "loss": None,
        "seed_deviation": None,
        "difference": None,
        "verdict": "",
        "short_loss": min(short_losses, default=None),
        "parameters": stored["parameters"],
        "relative_flops": stored["flops_per_token"] / baseline["flops_per_token"],
        "relative_speed": stored.get("speed", {}).get("relative"),
    }
    if len(reported) < len(entry.seeds):
        row["verdict"] = f"not complete: {len(losses)} runs"
        return row
    if math.inf in reported:
        row["verdict"] = "a seed diverged"
        return row
    row["loss"] = statistics.fmean(reported)
    if len(reported) > 1:
        row["seed_deviation"] = statistics.stdev(reported)
    if entry.name == tier.baseline:
        row["verdict"] = "baseline"
        row["relative_speed"] = 1.0
        return row
    first_losses, others = (item["code"]["first_losses"]["baseline"] for item in (stored, baseline))
    if not have_same_losses(first_losses, others):
        row["verdict"] = "not compared: other code"
        return row
    baseline_losses = [loss for run, loss in read_losses(baseline).items() if run.part == "seed"]
    row["difference"] = row["loss"] - statistics.fmean(baseline_losses)
    row["half_width"] = tier.noise.get_half_width(len(reported))
    standard_error = tier.noise.get_standard_error(len(reported))
    row["verdict"] = judge(row["difference"], standard_error, tier.quantile)
    own_error = tier.noise.get_standard_error(len(reported), row["seed_deviation"])
    if judge(row["difference"], own_error, tier.quantile) == "undecided" != row["verdict"]:
        row["verdict"] = "undecided by its own spread"
    return row


def list_rows(tier: Tier) -> list[dict[str, Any]]:
    """Return the rows of all stored entries, the lowest loss first and incomplete entries last."""
    entries = [files.read_json(path) for path in sorted(tier.results.glob("*.json"))]
    baseline = read_entry(get_baseline(tier))
    if not baseline["runs"]:
        raise ValueError(f"no run of {tier.baseline} is stored in {tier.results}")
    rows = [make_row(stored, tier, baseline) for stored in entries]
    return sorted(rows, key=lambda row: math.inf if row["loss"] is None else row["loss"])


def describe_spread(tier: Tier, rows: list[dict[str, Any]]) -> str:
    """Return in words what the spread of the entries' own seeds means for the rule, "" without any."""
    variances = [
        row["seed_deviation"] ** 2
        for row in rows
        if row["difference"] is not None and row["seed_deviation"] is not None
    ]
    if not variances:
        return ""
    pooled = math.sqrt(statistics.fmean(variances))
    degrees = len(variances) * (tier.num_seeds - 1)
    smallest_decided = tier.quantile * tier.noise.get_standard_error(tier.num_seeds)
    error = compute_error_with_own_sigma(tier.noise, pooled, tier.num_seeds, smallest_decided)
    return textwrap.fill(
        f"The seeds of the entries other than additive have a pooled standard deviation of "
        f"{pooled:.4f} nats ({degrees} degrees of freedom), those of additive of "
        f"{tier.noise.sigma:.4f}. If these are the true values, the rule decides on {error:.1%} of "
        "entries that equal additive.",
        width=120,
    )


def format_table(tier: Tier) -> str:
    """Return the table of a tier in Markdown, with the listed entries that were not run.

    Below it stands what the spread of the entries' own seeds means for the rule.
    """
    lines = [
        "| place | entry | loss | standard deviation of seeds | difference from additive, 95% interval "
        "| verdict | loss at 0.8M (tuning part, lowest try) | parameters | FLOPs | speed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = list_rows(tier)
    for place, row in enumerate(rows, start=1):
        loss = deviation = difference = ""
        if row["loss"] is not None:
            loss = f"{row['loss']:.4f}"
        if row["seed_deviation"] is not None:
            deviation = f"{row['seed_deviation']:.4f}"
        if row["difference"] is not None:
            difference = f"{row['difference']:+.4f} ± {row['half_width']:.4f}"
        short_loss = "" if row["short_loss"] is None else f"{row['short_loss']:.4f}"
        speed = "" if row["relative_speed"] is None else f"{row['relative_speed']:.2f}"
        lines.append(
            f"| {place if loss else ''} | {row['entry']} | {loss} | {deviation} | {difference} "
            f"| {row['verdict']} | {short_loss} | {row['parameters']:,} | {row['relative_flops']:.2f} | {speed} |"
        )
    stored_names = {row["name"] for row in rows}
    for entry in (Entry(tier, name, {}) for name in LISTED_ENTRIES):
        if entry.name not in stored_names:
            seconds = estimate_seconds(entry, make_plan(entry, {}).steps_left, Options.jobs)
            lines.append(
                f"|  | {entry.name} |  |  |  | not run: at least {seconds / 3600:.1f} hours |  |  |  |  |"
            )
    spread = describe_spread(tier, rows)
    return "\n".join([*lines, "", spread] if spread else lines)


def plot_differences(tier: Tier) -> "Figure":
    """Draw the differences from the baseline with their 95% intervals, the lowest loss first.

    The shaded band is what the tier does not decide.
    """
    rows = [row for row in list_rows(tier) if row["difference"] is not None]
    figure, axes = plots.make_panels(1, 1, 0.24 * len(rows) + 0.65, [])
    axis = axes[0, 0]
    for number, row in enumerate(rows, start=1):
        position = len(rows) - number
        axis.errorbar(
            row["difference"],
            position,
            xerr=row["half_width"],
            fmt=plots.MARKERS[number % len(plots.MARKERS)],
            color=plots.get_line_style(number)["color"],
            capsize=3,
        )
        text = f"{row['difference']:+.4f} ± {row['half_width']:.4f} ({tier.num_seeds})  {row['verdict']}"
        axis.annotate(
            text,
            (1, position),
            xytext=(6, 0),
            va="center",
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
        )
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(rows) - 1, -1, -1), [row["entry"] for row in rows])
    axis.set(
        ylim=(-0.6, len(rows) - 0.4),
        xlabel=f"validation loss in nats minus that of {tier.baseline}",
    )
    axis.grid(axis="y", visible=False)
    undecided = tier.quantile * tier.noise.get_standard_error(tier.num_seeds)
    axis.axvspan(-undecided, undecided, color="black", alpha=0.08, linewidth=0)
    return figure


# ---- the command ----


def read_command(argv: list[str], tier: Tier) -> tuple[Entry | None, Options]:
    """Read the command line.

    Raises:
        ValueError: there is no such variant, or a key or a value is wrong
    """
    own_options = collect_options(Options)
    words, texts = configurator.split_arguments(argv, own_options)
    if "help" in texts:
        configurator.print_help(__doc__, own_options)
        sys.exit(0)
    if len(words) > 1:
        raise ValueError(f"give one variant, not {len(words)}: {' '.join(words)}")
    model_options = collect_options(models.model_class(words[0]).Config) if words else {}
    configurator.check_names(texts, {**own_options, **model_options}, "--")
    options = Options(**configurator.read_settings({}, texts, own_options))
    if options.out is not None and Path(options.out).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--out={options.out} must end in .png, .svg or .pdf")
    if not words:
        for key in texts:
            if key not in ("mode", "out") or options.mode == "show":
                raise ValueError(f"--{key} needs a variant, as in track.py my-gpt-mha-rope --{key}")
        return None, options
    keys = configurator.read_settings({}, texts, model_options)
    fixed_keys = {**tier.read_settings(), **tier.defaults}.keys() & keys.keys()
    if fixed_keys:
        raise ValueError(f"--{min(fixed_keys)} is fixed by the tier {tier.name}: omit it")
    return Entry(tier, words[0], keys, options.first_seed), options


def main(tier: Tier = CPU_1) -> int:
    """Run the command and return its exit code."""
    entry, options = read_command(sys.argv[1:], tier)
    # every run has one thread, whatever the machine
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["WORLD_SIZE"] = "1"
    provenance.current_commit()  # read now, because files may change while runs train
    if entry is None or options.mode == "table":
        print(format_table(tier))
        if options.out is not None:
            with plots.use_print_style():
                plots.save(plot_differences(tier), Path(options.out))
        return 0
    if options.mode == "show":
        show_plan(entry, options.jobs)
        return 0
    check_tier(tier)
    check_causality(entry)
    stored = read_entry(entry)
    check_code(entry, stored)
    stored.update(measure_size(entry))
    if "speed" not in stored and entry.name != tier.baseline:
        print(f"measuring the speed beside {tier.baseline}; compiling takes a minute or two")
        stored["speed"] = measure_speed(entry)
        write_entry(entry, stored)
    runner = Runner(entry, stored, options.jobs)
    runner.run_all()
    if runner.signals:
        print(
            f"stopped by {runner.signals[-1].name}; to resume: {shlex.join(['python', *sys.argv])}"
        )
        return 128 + runner.signals[-1]
    print(format_table(tier))
    return 0


if __name__ == "__main__":
    with errors.one_line_errors():
        sys.exit(main())
