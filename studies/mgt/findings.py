"""What the runs of each experiment say: a row for each of them, and a word for every hypothesis of the paper.

A hypothesis is that a mean over seeds lies on one side of a number named in advance: supported where its whole 95%
interval does, refuted where none of it does, else undecided. Where the paper names no number, the one here is ours.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

import sweep
from benchmarks.figures import Figures
from data.loader import ValidationBatches
from data.shards import open_corpus
from harness import rank, subjects
from model import build, model_class
from training import checkpoint, distributed, metrics, statistics
from training.memory import parameters_of
from training.residual_statistics import Watched

NO_RISE = 0.05  # "monotonic" (H1): rises over falls
NEAR_ZERO = 0.1  # a rank "towards 0" (H1), and a "significant fraction" of negative gates
WINDOWS, ROWS = 16, 8  # validation sequences that ranks and gates are measured over; at once
SHARES = 0.0, 0.25, 0.5, 1.0  # of training, at which the gates are looked at


def claim(text: str, values: list[float], bound: float, above: bool) -> dict:
    """A hypothesis about the mean of `values`, one a seed: that it is above, or below, `bound`."""
    sign = -1 if above else 1
    word = statistics.hypothesis(statistics.interval([sign * value for value in values]), sign * bound)
    return {"hypothesis": text, **statistics.summary(values), "verdict": word}


def together(text: str, claims: list[dict]) -> dict:
    """A hypothesis that holds where all of its parts do."""
    words = [each["verdict"] for each in claims]
    word = next((word for word in ("refuted", "undecided") if word in words), "supported")
    return {"hypothesis": text, "n": min(each["n"] for each in claims), "mean": None, "ci95": None, "verdict": word}


def by_seed(rows: list[dict], value: str | Callable, **where) -> dict:
    """{seed: a value of its row} for the rows with these entries."""
    get = value if callable(value) else lambda row: row[value]
    return {row["seed"]: get(row) for row in rows if where.items() <= row.items()}


def less(own: dict, base: dict) -> list[float]:
    """own - base for every seed that both have."""
    return [own[seed] - base[seed] for seed in own if seed in base]


def about(cell: sweep.Cell) -> dict:
    """What tells one row of a report from another, and the commit that trained it."""
    names = {"arm": "mgt_arm", "layers": "num_hidden_layers", "width": "hidden_size", "seed": "seed"}
    trained_at = checkpoint.read_state(checkpoint.find(cell.folder)).get("commit")
    return {**{name: cell.settings[key] for name, key in names.items()}, "trained_at": trained_at}


@dataclass(frozen=True)
class Findings:
    """rows: a figure of each run. table: (header, rows of cells). verdicts: see `claim`."""

    rows: list[dict]
    header: list[str]
    table: list[list]
    verdicts: list[dict]


def mean_text(values: list[float], form: str = ".3f") -> str:
    return statistics.interval(values).text(form) if values else "-"


def groups(rows: list[dict], *keys: str) -> list[tuple[tuple, list[dict]]]:
    """(values of the keys, rows that have them), in the order of the rows."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.items())


# ---- 1: effective rank ----


def measure_rank(cells: list[sweep.Cell], figures: Figures) -> list[dict]:
    device, wanted = distributed.pick_device("auto"), []
    for number, cell in enumerate(cells, 1):
        subject = subjects.find(str(cell.folder))
        wanted.append(subject.identity)
        if figures.find(weights=subject.identity) is None:
            row = rank.measure_run(subject, "", WINDOWS, ROWS, device)
            corpus = open_corpus(cell.settings["dataset"])
            first = rank.over_validation(initial_model(cell), corpus, WINDOWS, ROWS, cell.title)
            own = {"initial_rank": first["rank"], "weights": subject.identity}
            figures.add({**row, **about(cell), **own}, "weights")
            print(f"{number} of {len(cells)}: {rank.line_of(row)}", flush=True)
    return [figures.find(weights=identity) for identity in wanted]


def rank_findings(rows: list[dict]) -> Findings:
    header = ["arm", "blocks", "untrained", "rank at the end", "lowest", "preserved", "slope of log rank"]
    table = [
        [
            *(f"`{arm}`", layers),
            *(
                mean_text([f(row) for row in group])
                for f in (untrained_rank, last_rank, lowest_rank, lambda row: row["preservation"])
            ),
            mean_text([row["slope"] for row in group], "+.4f"),
        ]
        for (arm, layers), group in groups(rows, "arm", "layers")
    ]
    return Findings(rows, header, table, rank_verdicts(rows))


def untrained_rank(row: dict) -> float:
    return row["initial_rank"][-1]


def last_rank(row: dict) -> float:
    return row["rank"][-1]


def lowest_rank(row: dict) -> float:
    return min(row["rank"])


def rises_over_falls(row: dict) -> float:
    """How much blocks raise the rank, in all, over how much others lower it: 0 where it decays monotonically."""
    steps = np.diff(row["rank"])
    return float(steps[steps > 0].sum() / max(-steps[steps < 0].sum(), 1e-12))


def rank_verdicts(rows: list[dict]) -> list[dict]:
    deep, shallow = (pick(row["layers"] for row in rows) for pick in (max, min))
    ends = {arm: by_seed(rows, last_rank, arm=arm, layers=deep) for arm in ("standard", "full", "additive")}
    verdicts = []
    if standard := ends["standard"]:
        slopes, risen = (by_seed(rows, key, arm="standard", layers=deep) for key in ("slope", rises_over_falls))
        parts = [
            claim(
                f"H1a: slope of the standard arm's log rank over {deep} blocks is below 0", [*slopes.values()], 0, False
            ),
            claim(
                f"H1b: all rises of that rank are below {NO_RISE:.0%} (ours) of all falls",
                [*risen.values()],
                NO_RISE,
                False,
            ),
            claim(f"H1c: its rank at the end is below {NEAR_ZERO} (ours)", [*standard.values()], NEAR_ZERO, False),
        ]
        if deep > shallow:
            change = less(standard, by_seed(rows, last_rank, arm="standard", layers=shallow))
            parts.append(claim(f"H1d: it is lower than after {shallow} blocks, by", change, 0, False))
        verdicts = [*parts, together("H1: the standard arm's rank decays monotonically towards 0 (H1a to H1d)", parts)]
    for name, arm in (("H2: the full arm's", "full"), ("the additive arm's", "additive")):
        if ends[arm]:
            lowest = by_seed(rows, lowest_rank, arm=arm, layers=deep)
            text = f"rank after {deep} blocks is above 0.5"
            verdicts.append(claim(f"{name} {text}", [*ends[arm].values()], 0.5, True))
            verdicts.append(claim(f"{name} {text}, at every depth", [*lowest.values()], 0.5, True))
    return verdicts


# ---- 2: ablation, and the copy task ----


def final_rows(cells: list[sweep.Cell]) -> list[dict]:
    """The last evaluation of every cell, and its size."""
    rows = []
    for cell in cells:
        final = sweep.final_evaluation(cell)
        figures = {key: value for key, value in final.items() if key.startswith("val_")}
        rows.append({**about(cell), "steps": final["step"], "parameters": parameters(cell), **figures})
    return rows


def parameters(cell: sweep.Cell) -> int:
    state = checkpoint.read_state(checkpoint.find(cell.folder))
    return parameters_of(state["model"], model_class(state["model"]).Config(**state["model_config"]))


def synergy(rows: list[dict]) -> list[float]:
    """Eq. 9 for every seed that has all four arms: the gain of both parts beyond the sum of either's gain, in nats."""
    arms = [by_seed(rows, "val_loss", arm=arm) for arm in ("standard", "full", "mhc", "ddl")]
    seeds = [seed for seed in arms[0] if all(seed in arm for arm in arms)]
    values = []
    for seed in seeds:
        base, both, mhc, ddl = (arm[seed] for arm in arms)
        values.append((base - both) - (base - mhc) - (base - ddl))
    return values


def against_standard(rows: list[dict]) -> dict[str, tuple[statistics.Estimate, str]]:
    """{arm: (validation loss less the standard arm's, a word for it)}, words corrected for their number."""
    base = by_seed(rows, "val_loss", arm="standard")
    differences = {}
    for (arm,), group in groups(rows, "arm"):
        if arm != "standard" and (values := less(by_seed(group, "val_loss"), base)):
            differences[arm] = statistics.interval(values)
    return dict(zip(differences, zip(differences.values(), statistics.verdicts([*differences.values()]))))


def ablation_findings(rows: list[dict]) -> Findings:
    header = ["arm", "parameters", "validation loss", "less that of `standard`", "that is"]
    compared = against_standard(rows)
    table = []
    for (arm,), group in groups(rows, "arm"):
        difference, word = compared.get(arm, (None, None))
        loss = mean_text([row["val_loss"] for row in group])
        table.append([f"`{arm}`", f"{group[0]['parameters']:,}", loss, difference and difference.text("+.3f"), word])
    values = synergy(rows)
    verdicts = [claim("synergy S (eq. 9, nats) is above 0", values, 0, True)] if values else []
    return Findings(rows, header, table, verdicts)


def copy_rows(cells: list[sweep.Cell]) -> list[dict]:
    """With the first evaluation at which 99% of the answers were right in every character; None: none was."""
    rows = final_rows(cells)
    for row, cell in zip(rows, cells):
        records = [record for record in metrics.read(cell.folder / "metrics.jsonl") if "val_loss" in record]
        row["evaluations"] = [[r["step"], r["val_exact_match"], r["val_loss"]] for r in records]
        row["solved_at"] = next((step for step, exact, _ in row["evaluations"] if exact >= 0.99), None)
    return rows


def copy_findings(rows: list[dict]) -> Findings:
    header = [
        "arm",
        "parameters",
        "validation loss",
        "exact matches (%)",
        "less than `standard`'s loss",
        "that is",
        "solved at step",
    ]
    compared = against_standard(rows)
    table = []
    for (arm,), group in groups(rows, "arm"):
        difference, word = compared.get(arm, (None, None))
        loss = mean_text([row["val_loss"] for row in group])
        exact = mean_text([100 * row["val_exact_match"] for row in group], ".1f")
        solved = ", ".join(str(row["solved_at"] or "-") for row in group)
        size = f"{group[0]['parameters']:,}"
        table.append([f"`{arm}`", size, loss, exact, difference and difference.text("+.3f"), word, solved])
    change = less(by_seed(rows, "val_loss", arm="full"), by_seed(rows, "val_loss", arm="standard"))
    verdicts = [claim("the full arm's loss less the standard arm's is below 0", change, 0, False)] if change else []
    return Findings(rows, header, table, verdicts)


# ---- 3: the gate beta ----


def measure_beta(cells: list[sweep.Cell], figures: Figures) -> list[dict]:
    wanted = []
    for cell in cells:
        for share in SHARES:
            key = {"seed": cell.settings["seed"], "share": share}
            digest = subjects.find(str(cell.folder)).identity
            if figures.find(**key, weights=digest) is None:
                model, step = model_at(cell, share)
                found = gates(model, cell.settings["dataset"])
                figures.add({**about(cell), **key, "step": step, "weights": digest, **found}, "seed", "share")
                print(f"{cell.title}: gates at step {step}", flush=True)
            wanted.append(figures.find(**key, weights=digest))
    return wanted


def initial_model(cell: sweep.Cell):
    """The model before its first step, made again from the seed."""
    state = checkpoint.read_state(checkpoint.find(cell.folder))
    torch.manual_seed(cell.settings["seed"])
    return build(state["model"], **state["model_config"]).to(distributed.pick_device("auto"))


def model_at(cell: sweep.Cell, share: float):
    """(the model after this share of training, its step)."""
    if share == 0:
        return initial_model(cell), 0
    nearest = min(
        checkpoint.all_of(cell.folder),
        key=lambda path: abs(checkpoint.step_of(path) - share * cell.settings["max_steps"]),
    )
    model, _, state = checkpoint.load_model(nearest, distributed.pick_device("auto"))
    return model, state["step"]


@torch.no_grad()
def gates(model, dataset: str) -> dict:
    """Of every block, over tokens, features and both sites: mean and variance of beta, and the share below 0; the mean
    of each site alone."""
    corpus, config = open_corpus(dataset), model.config
    batches = ValidationBatches(corpus.val, config.block_size, config.vocab_size, corpus.meta.get("window_tokens"))
    windows = rank.whole_windows(batches, WINDOWS)
    sites: dict[tuple[str, int], list] = {}

    def seen(site, quantities):
        found = quantities["statistics"]
        mean, variance = found["beta"].double(), found["beta_variance"].double()
        moments = [mean.mean(), (variance + mean.square()).mean(), found["beta_negative"].double().mean()]
        sites.setdefault((site.name, site.layer), []).append([float(x) for x in moments])

    for first in range(0, len(windows), ROWS):
        chunk = windows[first : first + ROWS]
        ids, _ = batches.get(chunk, len(chunk))
        with model.through(Watched(seen)):
            model(ids.to(model.transformer.wte.weight.device))
    moments = {
        name: np.array([np.mean(sites[name, layer], axis=0) for layer in range(config.num_hidden_layers)])
        for name in ("attn", "mlp")
    }
    mean, square, negative = ((moments["attn"] + moments["mlp"]) / 2).T
    found = {"mean": mean, "variance": square - mean**2, "negative": negative}
    found |= {f"mean_{name}": each[:, 0] for name, each in moments.items()}
    result = {name: values.tolist() for name, values in found.items()}
    return result | {"sign_changes": sign_changes(result["mean"])}


def sign_changes(means: list[float]) -> list[int]:
    """Blocks, from 0, whose mean has another sign than that of the block before."""
    return [layer for layer in range(1, len(means)) if (means[layer] < 0) != (means[layer - 1] < 0)]


def quarter(values: list[float], last: bool) -> float:
    """Mean over the first, or the last, quarter of the blocks."""
    count = max(len(values) // 4, 1)
    return float(np.mean(values[-count:] if last else values[:count]))


def beta_findings(rows: list[dict]) -> Findings:
    header = ["share of training", "first quarter: mean", "last quarter: mean", "last quarter: variance"]
    header += ["first quarter: below 0 (%)", "last quarter: below 0 (%)", "blocks where the mean changes sign"]
    table = []
    for (share,), group in groups(rows, "share"):
        figures = [("mean", False, 1), ("mean", True, 1), ("variance", True, 1), ("negative", False, 100)]
        texts = [
            mean_text([scale * quarter(row[key], last) for row in group])
            for key, last, scale in [*figures, ("negative", True, 100)]
        ]
        changes = "; ".join(", ".join(map(str, row["sign_changes"])) or "none" for row in group)
        table.append([f"{share:.0%}", *texts, changes])
    return Findings(rows, header, table, beta_verdicts(rows))


def beta_verdicts(rows: list[dict]) -> list[dict]:
    end = [row for row in rows if row["share"] == SHARES[-1]]
    early, deep = [quarter(row["mean"], False) for row in end], [quarter(row["negative"], True) for row in end]
    return [
        claim("early blocks (the first quarter): E[beta] is above 0 at the end", early, 0, True),
        claim(
            f"deep blocks (the last quarter): more than {NEAR_ZERO:.0%} (ours) of beta is below 0",
            deep,
            NEAR_ZERO,
            True,
        ),
        sharpening(rows),
    ]


def sharpening(rows: list[dict]) -> dict:
    """Whether the step of E[beta] at the block where its sign first changes is larger at the end than at a quarter.

    Refuted where no run's sign changes at the end: there is nothing that could sharpen.
    """
    text = "the step of E[beta] where its sign changes grows from 25% to 100% of training"
    quarter_of, end = ({r["seed"]: r for r in rows if r["share"] == share} for share in (SHARES[1], SHARES[-1]))
    if not any(row["sign_changes"] for row in end.values()):
        return {
            "hypothesis": f"{text}: it changes nowhere",
            "n": len(end),
            "mean": None,
            "ci95": None,
            "verdict": "refuted",
        }
    both = [seed for seed in end if end[seed]["sign_changes"] and quarter_of.get(seed, {}).get("sign_changes")]
    if len(both) < len(end):
        return {"hypothesis": text, "n": len(both), "mean": None, "ci95": None, "verdict": "undecided"}
    return claim(text, [step_at_change(end[seed]) - step_at_change(quarter_of[seed]) for seed in both], 0, True)


def step_at_change(row: dict) -> float:
    layer = row["sign_changes"][0]
    return abs(row["mean"][layer] - row["mean"][layer - 1])


# ---- 4: depth at one size; 5: language modelling ----


def course_rows(cells: list[sweep.Cell]) -> list[dict]:
    """Final rows with the course of the validation loss, and how many epochs each took to the target: the highest final
    loss of any run of its depth, which all of them reach."""
    rows = final_rows(cells)
    for row, cell in zip(rows, cells):
        records = metrics.read(cell.folder / "metrics.jsonl")
        tokens = checkpoint.read_state(checkpoint.find(cell.folder))["corpus"]["train"]["tokens"]
        row["evaluations"] = [[r["step"], r["tokens"] / tokens, r["val_loss"]] for r in records if "val_loss" in r]
        row["training"] = [[r["step"], r["loss"]] for r in records if "loss" in r][:: max(len(records) // 500, 1)]
    for row in rows:
        row["target"] = max(other["val_loss"] for other in rows if other["layers"] == row["layers"])
        row["epochs_to_target"] = next(epochs for _, epochs, loss in row["evaluations"] if loss <= row["target"])
    return rows


def depth_findings(rows: list[dict]) -> Findings:
    header = ["blocks", "arm", "width", "parameters", "validation loss", "its deviation", "epochs to the target"]
    table = []
    for (layers, arm), group in groups(rows, "layers", "arm"):
        losses = [row["val_loss"] for row in group]
        spread = f"{np.std(losses, ddof=1):.3f}" if len(losses) > 1 else None
        epochs = mean_text([row["epochs_to_target"] for row in group])
        size = f"{group[0]['parameters']:,}"
        table.append([layers, f"`{arm}`", group[0]["width"], size, mean_text(losses), spread, epochs])
    return Findings(rows, header, table, depth_verdicts(rows))


def gap(rows: list[dict], layers: int) -> dict:
    """{seed: loss of the full arm less that of the standard arm}."""
    full, standard = (by_seed(rows, "val_loss", arm=arm, layers=layers) for arm in ("full", "standard"))
    return {seed: full[seed] - standard[seed] for seed in full if seed in standard}


def depth_verdicts(rows: list[dict]) -> list[dict]:
    gaps = {layers: gap(rows, layers) for layers in sorted({row["layers"] for row in rows})}
    gaps = {layers: values for layers, values in gaps.items() if values}
    if not gaps:
        return []
    text = "the full arm's loss less the standard arm's is below 0"
    parts = [claim(f"{layers} blocks: {text}", [*values.values()], 0, False) for layers, values in gaps.items()]
    deepest, shallowest = gaps[max(gaps)], gaps[min(gaps)]
    if len(gaps) > 1 and (change := less(deepest, shallowest)):
        parts.append(claim(f"it falls from {min(gaps)} to {max(gaps)} blocks, by", change, 0, False))
        parts.append(together("MGT scales better with depth: better at the deepest, by more", parts[-2:]))
    return parts


def language_findings(rows: list[dict]) -> Findings:
    header = ["arm", "parameters", "validation loss", "perplexity", "epochs to the target"]
    table = []
    for (arm,), group in groups(rows, "arm"):
        loss, perplexity = (
            mean_text([row[key] for row in group], form)
            for key, form in (("val_loss", ".3f"), ("val_perplexity", ".1f"))
        )
        epochs = mean_text([row["epochs_to_target"] for row in group])
        table.append([f"`{arm}`", f"{group[0]['parameters']:,}", loss, perplexity, epochs])
    values = [*gap(rows, rows[0]["layers"]).values()]
    text = "the full arm's loss less the standard arm's is below 0"
    return Findings(rows, header, table, [claim(text, values, 0, False)] if values else [])
