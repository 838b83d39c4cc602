"""Tables, verdicts and figures of the controlled comparison (PLAN2.md), from the stored rows.

    python research/residual_streams/study_report.py

Writes study.json, study.md and the figures to results/residual_streams (or to --results=FOLDER).
"""

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import numpy as np

import configurator
from data.shards import open_corpus
from model import build
from research import compare, plots
from research.residual_streams import claims, rates, runner, single_rate, study, trigram
from research.residual_streams.claims import Losses
from research.residual_streams.streams import ARMS, BASELINE, PUBLISHED, TOLERANCE
from research.rows import read_rows
from training.provenance import collect_provenance, store_figures
from training.settings import configure
from utils import files, tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHANCE = float(np.log(8))  # the loss on registers of a model that knows nothing
# percent of the answers of a model that overlooks swaps (data/registers)
CORRECT_WITHOUT_SWAPS = 50
TOLERATED_LOSS = 0.05  # nats above the minimum, for the width of rates
MAX_SHOWN_EXCESS = 0.3  # nats above the minimum that have the darkest color
SEQ_LEN = 128
BATCH_SIZE = study.TOKENS_PER_STEP // SEQ_LEN
PROBLEMS = ("language", *single_rate.PROBLEMS)
KIND_COLORS = {
    BASELINE: plots.BASELINE_COLOR,
    "controls": plots.COLORS[1],
    "DDL": plots.COLORS[0],
    "published streams": plots.COLORS[2],
}
# of the figure of registers: colors, and offsets from the position of a size
REGISTERS_MARKERS = {
    BASELINE: (plots.BASELINE_COLOR, -0.3),
    "ddl_1": (plots.COLORS[0], -0.15),
    "ddl_1_no_erase": (plots.COLORS[0], 0.0),
    "ddl_tc": (plots.COLORS[1], 0.15),
    "ddl_tc_no_erase": (plots.COLORS[1], 0.3),
}


# ---- what the tables show ----


def compute_trigrams() -> dict[str, dict[str, float]]:
    """Return the loss of a trigram at each rung on each half of the validation split.

    It is counted on the tokens that runs with seed 0 see.
    """
    corpus = open_corpus(study.DATASET)
    losses = {}
    for rung, steps in study.RUNGS.items():
        windows = trigram.read_training_windows(corpus, SEQ_LEN, BATCH_SIZE, 0, steps)
        model = trigram.Trigram(windows, corpus.meta["vocab_size"])
        losses[rung] = {}
        for half in ("first", "second"):
            scored = trigram.read_validation_windows(corpus, SEQ_LEN, half)
            losses[rung][half] = float(model.losses(scored).mean())
    return losses


def summarize_tries(rows: list[dict], arm: str) -> dict:
    """Return the best rates of an arm at the shorter rung, and whether its tries surround the best.

    "is_inside" is about the best point on the grid of whole steps (`rates.is_inside`).
    """
    losses = study.select_losses(rows, arm, "short", "try")
    if len(losses) < rates.NUM_TRIES:
        return {"tries": len(losses)}
    muon_rate, adamw_rate = rates.to_rates(rates.find_best(losses))
    return {
        "tries": len(losses),
        "muon_rate": muon_rate,
        "adamw_rate": adamw_rate,
        "is_inside": rates.is_inside(losses),
    }


def summarize_checks(rows: list[dict], arm: str) -> dict:
    """Return the best rates of an arm at the longer rung, and whether they are inside its checks."""
    losses = study.select_losses(rows, arm, "long", "check")
    if len(losses) < len(study.CHECKED_POWERS):
        return {}
    best = rates.find_best(losses)
    muon_rate, adamw_rate = rates.to_rates(best)
    return {
        "long_muon_rate": muon_rate,
        "long_adamw_rate": adamw_rate,
        # both rates of a check have the same order
        "is_long_inside": min(losses) < best < max(losses),
        "check_loss": losses[best],
        "edge_loss": next(iter(study.select_losses(rows, arm, "long", "edge").values()), None),
    }


@cache  # the models of all arms take seconds to build
def measure_size(arm: str) -> dict[str, float]:
    """Return the parameters of an arm, and its FLOPs per training token."""
    run = study.Run(arm, "short", "try", study.TUNING_SEED, (0, 0))
    config, model_config = configure(study.make_arguments(run))
    model = build(config.model, model_config)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_token": model.flops_per_token(),
    }


def summarize_language(rows: list[dict], speeds: list[dict]) -> list[dict]:
    """Return rates, losses and what they are beside the baseline's, of every arm."""
    losses = Losses.from_rows(rows, "rung")
    losses_of_first_half = Losses.from_rows(rows, "rung", "first_half")
    relative_speeds = claims.compute_relative_speeds(speeds)
    groups = []
    for arm in ARMS:
        group = {
            "arm": arm,
            **measure_size(arm),
            **summarize_tries(rows, arm),
            **summarize_checks(rows, arm),
        }
        if arm in relative_speeds:
            speeds_of_rounds = relative_speeds[arm]
            group["speed"] = float(np.median(speeds_of_rounds))
            group["lowest_speed"] = min(speeds_of_rounds)
            group["highest_speed"] = max(speeds_of_rounds)
        for rung in study.RUNGS:
            if (arm, rung) not in losses.runs:
                continue
            group[rung] = compare.summarize(losses.table((arm, rung)).mean(1).tolist())
            if arm != BASELINE:
                difference = losses.contrast(claims.subtract(arm, BASELINE, rung))
                if difference is not None:
                    group[f"{rung}_difference"] = claims.describe(difference)
        if arm != BASELINE:
            weights = claims.subtract(arm, BASELINE, "long")
            difference = losses_of_first_half.contrast(weights)
            if difference is not None:
                group["first_half_difference"] = claims.describe(difference)
        if "short_difference" in group and "long_difference" in group:
            group["token_multiplier"] = claims.resample_token_multiplier(losses, arm)
            for speed in ("speed", "lowest_speed", "highest_speed"):
                if speed in group:
                    difference = claims.compare_at_equal_seconds(losses, arm, group[speed])
                    group[f"equal_seconds_at_{speed}"] = claims.describe(difference)
        groups.append(group)
    return groups


def summarize_problem(rows: list[dict], problem: single_rate.Problem) -> list[dict]:
    """Return the rate, the loss and the accuracy of every arm at every size of a problem."""
    losses = Losses.from_rows(rows, "size")
    groups = []
    for size in problem.sizes:
        for arm in problem.seeds:
            tries = single_rate.select_losses(rows, arm, size)
            reported = [
                row
                for row in rows
                if (row["arm"], row["size"], row["phase"]) == (arm, size, "report")
                and row["val_loss"] is not None
            ]
            if not reported:
                continue
            power = rates.find_best_power(tries) if tries else 0.0
            group = {
                "problem": problem.name,
                "size": size,
                "arm": arm,
                "learning_rate": problem.start_rate * 2**power,
                "is_inside": not tries or min(tries) < power < max(tries),
                "val_loss": compare.summarize([row["val_loss"] for row in reported]),
            }
            if "val_accuracy" in reported[0]:
                accuracies = [row["val_accuracy"] for row in reported]
                group["val_accuracy"] = compare.summarize(accuracies)
            if arm != BASELINE:
                difference = losses.contrast(claims.subtract(arm, BASELINE, size))
                if difference is not None:
                    group["difference"] = claims.describe(difference)
            groups.append(group)
    return groups


def summarize_erase(rows: list[dict]) -> list[dict]:
    """Return the effect of erase on the loss of registers, at every size and number of columns."""
    losses = Losses.from_rows(rows, "size")
    effects = []
    for size in single_rate.REGISTERS.sizes:
        for arm in ("ddl_1", "ddl_tc"):
            contrast = losses.contrast(claims.subtract(arm, f"{arm}_no_erase", size))
            if contrast is not None:
                effects.append({"size": size, "arm": arm, **claims.describe(contrast)})
    return effects


def measure_width(losses: Mapping[rates.Point, float], axis: int) -> dict[str, float | bool]:
    """Measure over which factor of one rate the loss stays near the minimum.

    Only points on the grid of whole steps count, because those between were tried with fewer values
    of the other rate. The best loss at each value of the rate counts, whatever the other rate is.
    Between values the loss is linear in the logarithm of the rate.

    Args:
        losses: by point
        axis: 0 for Muon's rate, 1 for AdamW's

    Returns:
        "factor", and "is_lower_limit": whether it reaches an edge of what was tried
    """
    best_by_power: dict[float, float] = {}
    for point, loss in losses.items():
        if rates.is_whole(point):
            best_by_power[point[axis]] = min(loss, best_by_power.get(point[axis], np.inf))
    powers = sorted(power for power, loss in best_by_power.items() if np.isfinite(loss))
    fine_powers = np.linspace(powers[0], powers[-1], 1001)
    fine_losses = np.interp(fine_powers, powers, [best_by_power[power] for power in powers])
    # the range around the minimum in which no loss is too high
    minimum = int(np.argmin(fine_losses))
    too_high = np.flatnonzero(fine_losses > fine_losses[minimum] + TOLERATED_LOSS)
    first = max(too_high[too_high < minimum], default=-1) + 1
    last = min(too_high[too_high > minimum], default=len(fine_powers)) - 1
    return {
        "factor": float(2 ** (fine_powers[last] - fine_powers[first])),
        "is_lower_limit": bool(first == 0 or last == len(fine_powers) - 1),
    }


def summarize_tolerance(rows: list[dict]) -> list[dict]:
    """Return every point of rates that was tried for two arms, with the width of each rate."""
    groups = []
    for arm in TOLERANCE:
        losses = study.select_losses(rows, arm, "short", "try")
        corner_losses = study.select_losses(rows, arm, "short", "corner")
        if len(corner_losses) < len(rates.CORNERS):
            continue
        all_losses = losses | corner_losses
        groups.append(
            {
                "arm": arm,
                "minimum": min(all_losses.values()),
                "muon_width": measure_width(all_losses, 0),
                "adamw_width": measure_width(all_losses, 1),
                "tries": [[*rates.to_rates(point), loss] for point, loss in losses.items()],
                "corners": [
                    [*rates.to_rates(point), loss] for point, loss in corner_losses.items()
                ],
            }
        )
    return groups


def count_missing(rows: dict[str, list[dict]], speeds: list[dict]) -> dict[str, int]:
    """Return how many runs every command has left."""
    missing = {}
    for stage in study.STAGES:
        arms = study.list_arms(stage)
        stage_rows = speeds if stage == "speed" else rows["language"]
        finished = study.count_finished(stage, arms, stage_rows)
        # "again" has more rows than it needs after it was run on a second kind of machine
        missing[f"study.py {stage}"] = max(study.count_all_runs(stage, arms) - finished, 0)
    for name, problem in single_rate.PROBLEMS.items():
        arms = list(problem.seeds)
        num_missing = single_rate.count_missing(problem, arms, rows[name])
        missing[f"single_rate.py {name}"] = num_missing
    return missing


def summarize(
    rows: dict[str, list[dict]], speeds: list[dict], trigrams: dict[str, dict[str, float]]
) -> dict:
    """Return everything that the tables and figures show."""
    missing = count_missing(rows, speeds)
    sizes = ()
    if not missing["single_rate.py registers"]:
        sizes = claims.list_sizes_below_chance(rows["registers"], CHANCE)
    losses = {
        "language": Losses.from_rows(rows["language"], "rung"),
        "registers": Losses.from_rows(rows["registers"], "size"),
    }
    return {
        "trigrams": trigrams,
        "missing": missing,
        "verdicts": claims.judge_all(claims.list_claims(sizes), losses),
        "language": summarize_language(rows["language"], speeds),
        "effects": {
            name: claims.describe(contrast)
            for name, weights in claims.list_effects().items()
            if (contrast := losses["language"].contrast(weights)) is not None
        },
        "tolerance": summarize_tolerance(rows["language"]),
        "registers_sizes": list(sizes),
        # models of reported runs that were evaluated on the first half, without training
        "num_saved_models": sum(
            row["phase"] == "first_half" and "train_loss" not in row for row in rows["language"]
        ),
        "erase_in_registers": summarize_erase(rows["registers"]),
        "groups": [
            group
            for name, problem in single_rate.PROBLEMS.items()
            for group in summarize_problem(rows[name], problem)
        ],
        "repeats": [
            {key: row[key] for key in ("arm", "seed", "val_loss", "same_bits")}
            for row in rows["language"]
            if row["phase"] == "again"
        ],
    }


def has_language_verdicts(report: dict) -> bool:
    """Return whether every claim about language is judged, and so all of its arms are trained."""
    return all(
        result["verdict"] != "not run" for result in report["verdicts"] if result["number"] != 9
    )


# ---- tables ----


def format_interval(result: Mapping[str, float] | None, number_format: str = "+.3f") -> str | None:
    """Format a mean with its 95% interval, `-0.012 (-0.020 to -0.004)`."""
    if result is None:
        return None
    mean, low, high = (format(result[key], number_format) for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def format_mean(summary: dict | None, number_format: str = ".3f") -> str | None:
    """Format the mean over seeds with half its 95% interval."""
    if summary is None:
        return None
    return compare.estimate_mean(summary["values"]).format(number_format)


def format_rates(muon_rate: float, adamw_rate: float, *, is_inside: bool) -> str:
    """Format a pair of rates, `0.0141, 0.0566 (edge)` if the tries do not surround the best."""
    edge = "" if is_inside else " (edge)"
    return f"{muon_rate:.3g}, {adamw_rate:.3g}{edge}"


def format_speed(group: dict) -> str | None:
    """Format the speed over the baseline's: the median over rounds, and its range."""
    if "speed" not in group:
        return None
    return f"{group['speed']:.2f} ({group['lowest_speed']:.2f} to {group['highest_speed']:.2f})"


def format_width(width: Mapping[str, float | bool]) -> str:
    """Format the factor of a rate, `≥ 4.0` if it reaches an edge of what was tried."""
    return f"{'≥ ' if width['is_lower_limit'] else ''}{width['factor']:.1f}"


def format_verdicts(verdicts: list[dict]) -> str:
    """Format the claims with their estimates and verdicts."""
    header = ("", "claim", "nats (95% interval)", "p (Holm)", "verdict")
    cells = []
    for result in verdicts:
        has_run = "mean" in result
        cells.append(
            [
                result["number"],
                result["claim"],
                format_interval(result, "+.4f") if has_run else None,
                f"{result['p_holm']:.2g}" if has_run else None,
                f"**{result['verdict']}**",
            ]
        )
    return tables.format_markdown(header, cells)


def format_language(groups: list[dict]) -> str:
    """Format the arms of the language model: rates, losses, and what they save."""
    header = (
        "arm",
        "parameters (millions)",
        "MFLOPs per token",
        "rates of Muon and AdamW, 0.8M",
        "rates, 3.3M",
        "loss, 0.8M tokens",
        "loss, 3.3M tokens",
        "minus additive's, 0.8M",
        "minus additive's, 3.3M",
        "minus additive's, 3.3M, on the first half",
        "token multiplier",
        "speed (lowest to highest of three)",
        "minus additive's, equal seconds at the median speed",
        "minus additive's, equal seconds at the highest speed",
    )
    cells = []
    for group in groups:
        short_rates = long_rates = None
        if "muon_rate" in group:
            short_rates = format_rates(
                group["muon_rate"], group["adamw_rate"], is_inside=group["is_inside"]
            )
        if "long_muon_rate" in group:
            long_rates = format_rates(
                group["long_muon_rate"], group["long_adamw_rate"], is_inside=group["is_long_inside"]
            )
        cells.append(
            [
                f"`{group['arm']}`",
                f"{group['parameters'] / 1e6:.3f}",
                f"{group['flops_per_token'] / 1e6:.2f}",
                short_rates,
                long_rates,
                format_mean(group.get("short")),
                format_mean(group.get("long")),
                format_interval(group.get("short_difference")),
                format_interval(group.get("long_difference")),
                format_interval(group.get("first_half_difference")),
                format_interval(group.get("token_multiplier"), ".2f"),
                format_speed(group),
                format_interval(group.get("equal_seconds_at_speed")),
                format_interval(group.get("equal_seconds_at_highest_speed")),
            ]
        )
    return tables.format_markdown(header, cells)


def format_groups(groups: list[dict]) -> str:
    """Format the runs with a single rate."""
    header = ("problem", "size", "arm", "rate", "loss", "minus additive's", "correct answers (%)")
    cells = []
    for group in groups:
        edge = "" if group["is_inside"] else " (edge)"
        accuracy = None
        if "val_accuracy" in group:
            percent = [100 * value for value in group["val_accuracy"]["values"]]
            accuracy = compare.estimate_mean(percent).format(".1f")
        cells.append(
            [
                group["problem"],
                group["size"].replace("_", " "),
                f"`{group['arm']}`",
                f"{group['learning_rate']:.3g}{edge}",
                format_mean(group["val_loss"]),
                format_interval(group.get("difference")),
                accuracy,
            ]
        )
    return tables.format_markdown(header, cells)


def format_page(report: dict) -> str:
    """Return the Markdown page of all tables."""
    parts = [
        "# The controlled comparison: all arms and claims",
        "Made by `research/residual_streams/study_report.py`; the same figures are in `study.json`, "
        "and the rules in `research/residual_streams/PLAN2.md`. Losses are nats per token, means "
        "over seeds ± half the width of their 95% interval (number of seeds). Differences are over "
        "the seeds that both arms have, and their intervals cover seeds and sequences.",
        "## Claims",
        format_verdicts(report["verdicts"]),
        "## Language",
        "A trigram counted on the same tokens has a loss of "
        f"{report['trigrams']['short']['second']:.3f} nats after 0.8 million tokens and "
        f'{report["trigrams"]["long"]["second"]:.3f} after 3.3 million. "(edge)" marks rates that '
        "were not tried with all of their neighbors; after 0.8 million tokens, this is about the "
        "best rates on the grid of factors of two, beside which those of the table may lie. "
        "Intervals of token multipliers are bootstrapped over five seeds. They are too narrow, so "
        f"judge by the differences. On the first half, {report['num_saved_models']} models are those "
        "of reported runs; the others were trained again (`language.jsonl` names the machines).",
        format_language(report["language"]),
    ]
    if has_language_verdicts(report):
        effects = [[name, format_interval(effect)] for name, effect in report["effects"].items()]
        parts += [
            "## Effects at 3.3 million tokens",
            tables.format_markdown(("part", "nats (95% interval)"), effects),
        ]
    edges = [group for group in report["language"] if group.get("edge_loss") is not None]
    if edges:
        cells = [
            [
                f"`{group['arm']}`",
                f"{group['check_loss']:.3f}",
                f"{group['edge_loss']:.3f}",
            ]
            for group in edges
        ]
        header = ("arm", "at the edge", "beyond it")
        parts += [
            "## Beyond the edge of the rates at 3.3 million tokens",
            "Losses of one seed on the first half of the validation split. The runs beyond the "
            "edge are not in the plan, and chose nothing.",
            tables.format_markdown(header, cells),
        ]
    if report["tolerance"]:
        cells = [
            [
                f"`{group['arm']}`",
                f"{group['minimum']:.3f}",
                format_width(group["muon_width"]),
                format_width(group["adamw_width"]),
            ]
            for group in report["tolerance"]
        ]
        header = ("arm", "minimum", "factor of Muon's rate", "factor of AdamW's rate")
        parts += [
            f"## Rates within {TOLERATED_LOSS} nats of the minimum",
            "The factors are those between the lowest and the highest rate around the minimum, on "
            "the grid of factors of two, with the best value of the other rate.",
            tables.format_markdown(header, cells),
        ]
    if report["groups"]:
        parts += ["## Registers and yardsticks", format_groups(report["groups"])]
    parts.append("## Runs that are missing")
    missing = {command: number for command, number in report["missing"].items() if number}
    parts += [
        f"{number} runs: `python research/residual_streams/{command}`"
        for command, number in missing.items()
    ] or ["None."]
    for repeat in report["repeats"]:
        word = "the same bits" if repeat["same_bits"] else "other bits"
        parts.append(f"`{repeat['arm']}`, seed {repeat['seed']}, trained again: {word}.")
    return "\n\n".join(parts) + "\n"


# ---- figures ----


def draw_interval(panel: "Axes", result: dict, height: float, color: str) -> None:
    """Draw a mean and its 95% interval as a horizontal bar."""
    below = result["mean"] - result["low"]
    above = result["high"] - result["mean"]
    panel.errorbar(result["mean"], height, xerr=[[below], [above]], fmt="o", color=color, capsize=3)


def choose_kind(arm: str) -> str:
    """Return the kind of an arm, which has a color of its own in the figure of losses."""
    if arm == BASELINE:
        return BASELINE
    if arm.startswith("ddl"):
        return "DDL"
    return "published streams" if arm in PUBLISHED else "controls"


def draw_losses(report: dict) -> "Figure":
    """Draw losses over tokens, and each arm's difference to the baseline at both rungs."""
    groups = [group for group in report["language"] if "short" in group]
    figure, [[curves, *panels]] = plots.make_panels(1, 3, 3.4, [*KIND_COLORS, "trigram"])
    tokens = [steps * study.TOKENS_PER_STEP / 1e6 for steps in study.RUNGS.values()]
    entries = {}
    for group in groups:
        kind = choose_kind(group["arm"])
        means = [group[rung]["mean"] for rung in study.RUNGS if rung in group]
        (entries[kind],) = curves.plot(
            tokens[: len(means)], means, "o-", color=KIND_COLORS[kind], markersize=3
        )
    trigrams = [report["trigrams"][rung]["second"] for rung in study.RUNGS]
    (entries["trigram"],) = curves.plot(tokens, trigrams, color="black", linestyle=":")
    curves.set(xscale="log", xlabel="training tokens (millions)")
    curves.set_xticks(tokens, [f"{value:.1f}" for value in tokens])
    curves.set_xticks([], minor=True)
    curves.set_ylabel("validation loss (nats; lower is better)")
    compared = [group for group in reversed(groups) if group["arm"] != BASELINE]
    for panel, rung, value in zip(panels, study.RUNGS, tokens, strict=True):
        for height, group in enumerate(compared):
            if f"{rung}_difference" in group:
                color = KIND_COLORS[choose_kind(group["arm"])]
                draw_interval(panel, group[f"{rung}_difference"], height, color)
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_ylim(-0.5, len(compared) - 0.5)
        panel.set_yticks(range(len(compared)), [])
        panel.set_xlabel(f"minus additive's loss\n(nats), {value:.1f}M tokens")
    panels[0].set_yticks(range(len(compared)), [group["arm"] for group in compared])
    plots.add_legend(figure, entries)
    return figure


def draw_effects(effects: Mapping[str, dict], trigram_difference: float) -> "Figure":
    """Draw what each part changes at the longer rung.

    Args:
        trigram_difference: the loss of a trigram minus the baseline's, too large for the axis
    """
    figure, [[panel]] = plots.make_panels(1, 1, 3.6, [])
    for height, effect in enumerate(reversed(effects.values())):
        draw_interval(panel, effect, height, plots.COLORS[0])
    labels = [name.replace(": ", "\n") for name in reversed(effects)]
    panel.set_yticks(range(len(effects)), labels, fontsize=8)
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_xlabel(
        "change of the loss at 3.3M tokens (nats; lower is better)\n"
        f"a trigram instead of additive: {trigram_difference:+.3f}"
    )
    return figure


def draw_tolerance(groups: list[dict], trigram_loss: float) -> "Figure":
    """Draw the loss at every pair of rates that was tried, a panel for each arm."""
    figure, [panels] = plots.make_panels(1, len(groups), 2.8, [], sharey="row", sharex="row")
    for panel, group in zip(panels, groups, strict=True):
        for kind, marker in (("tries", "o"), ("corners", "s")):
            muon_rates, adamw_rates, losses = zip(*group[kind], strict=True)
            panel.scatter(
                muon_rates,
                adamw_rates,
                c=[loss - group["minimum"] for loss in losses],
                cmap="Blues",
                vmin=0,
                vmax=MAX_SHOWN_EXCESS,
                marker=marker,
                edgecolors="black",
                linewidths=0.5,
                s=300,
            )
        points = group["tries"] + group["corners"]
        for muon_rate, adamw_rate, loss in points:
            excess = loss - group["minimum"]
            panel.annotate(
                f"{excess:.2f}",
                (muon_rate, adamw_rate),
                ha="center",
                va="center",
                color="white" if excess > MAX_SHOWN_EXCESS / 2 else "black",
                fontsize=7,
            )
        panel.set(xscale="log", yscale="log", xlabel="Muon's learning rate")
        panel.margins(0.25)
        panel.set_title(
            f"{group['arm']}: minimum {group['minimum']:.3f} nats (trigram: {trigram_loss:.3f})",
            fontsize=8,
        )
        for number, axis in enumerate((panel.xaxis, panel.yaxis)):
            values = sorted({point[number] for point in points})
            whole_steps = [
                value for value in values if np.log2(value / rates.START[number]).is_integer()
            ]
            axis.set_ticks(whole_steps, [f"{rate:.3g}" for rate in whole_steps])
            axis.set_ticks([], minor=True)
    panels[0].set_ylabel("AdamW's learning rate")
    return figure


def describe_size(size: str) -> str:
    """Return the width and the depth of the models of registers, `d = 16,\\n4 layers`."""
    keys = single_rate.REGISTERS.sizes[size]
    return f"d = {keys['hidden_size']},\n{keys['num_hidden_layers']} layers"


def draw_registers(report: dict) -> "Figure":
    """Draw the accuracy on registers and the effect of erase on the loss."""
    groups = [group for group in report["groups"] if group["problem"] == "registers"]
    arms = list(single_rate.REGISTERS.seeds)
    sizes = list(single_rate.REGISTERS.sizes)
    figure, [[answers, effects]] = plots.make_panels(1, 2, 2.8, arms)
    entries = {}
    for group in groups:
        color, offset = REGISTERS_MARKERS[group["arm"]]
        values = [100 * value for value in group["val_accuracy"]["values"]]
        position = sizes.index(group["size"]) + offset
        is_filled = not group["arm"].endswith("_no_erase")
        (entries[group["arm"]],) = answers.plot(
            [position] * len(values),
            values,
            "o",
            color=color,
            markersize=4,
            markerfacecolor=color if is_filled else "none",
        )
    answers.axhline(100 / 8, color="black", linewidth=0.8, linestyle=":")
    answers.axhline(CORRECT_WITHOUT_SWAPS, color="black", linewidth=0.8, linestyle="--")
    answers.set_xticks(range(len(sizes)), [describe_size(size) for size in sizes])
    answers.set_ylabel("correct answers (%)")
    results = report["erase_in_registers"]
    for height, result in enumerate(reversed(results)):
        color = plots.COLORS[0 if result["arm"] == "ddl_1" else 1]
        draw_interval(effects, result, height, color)
    labels = [f"{result['arm']}\n{describe_size(result['size'])}" for result in reversed(results)]
    effects.set_yticks(range(len(results)), [label.replace(",\n", ", ") for label in labels])
    effects.axvline(0, color="black", linewidth=0.8)
    effects.set_xlabel("loss with erase minus without\n(nats; lower is better)")
    plots.add_legend(figure, entries)
    return figure


# The findings of the figures; test_stream_results.py checks that the stored figures show them.
TITLES = {
    "study_losses": "The lead of DDL with four columns after 0.8 million tokens is gone after 3.3 million",
    "study_effects": "DDL's write to four columns raises the loss; erase has no measurable effect",
    "study_rates": "The best pair of rates for ddl_tc is one that its tuning did not try (square)\n"
    "(nats above the minimum; 0.8 million tokens, first half of validation, one seed)",
    "study_registers": "On registers, erase does not measurably lower the loss, and no arm learned the task\n"
    "(dashed: a model that overlooks swaps; dotted: chance)",
}


def save_figures(report: dict, results: Path) -> None:
    """Draw the figures whose runs are finished."""
    figures = {}
    if has_language_verdicts(report):
        figures["study_losses"] = draw_losses(report)
        [additive] = [group for group in report["language"] if group["arm"] == BASELINE]
        trigram_difference = report["trigrams"]["long"]["second"] - additive["long"]["mean"]
        figures["study_effects"] = draw_effects(report["effects"], trigram_difference)
    if report["tolerance"]:
        trigram_loss = report["trigrams"]["short"]["first"]
        figures["study_rates"] = draw_tolerance(report["tolerance"], trigram_loss)
    if report["erase_in_registers"]:
        figures["study_registers"] = draw_registers(report)
    for name, figure in figures.items():
        figure.suptitle(TITLES[name], fontsize=9)
        plots.save(figure, results / f"{name}.png")


def main() -> None:
    with errors.one_line_errors(ValueError, OSError):
        names, options = configurator.split_arguments(sys.argv[1:])
        if "help" in options:
            print((__doc__ or "").strip())
            return
        if names or options.keys() - {"results"}:
            raise ValueError(f"{' '.join(sys.argv[1:])}: give --results=FOLDER or nothing")
        runner.check_dataset(study.DATASET, study.DATASET_COMMAND)
        results = Path(options.get("results", runner.OPTIONS["results"]))
        rows = {name: read_rows(results / f"{name}.jsonl") for name in PROBLEMS}
        speeds = read_rows(results / "speeds.jsonl")
        report = summarize(rows, speeds, compute_trigrams())
        store_figures(results / "study.json", report, collect_provenance())
        files.write_text(results / "study.md", format_page(report))
        with plots.use_print_style():
            save_figures(report, results)
    print((results / "study.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
