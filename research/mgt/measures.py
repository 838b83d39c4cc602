"""The figures of every run of the MGT experiments: what its folder says, and what its model does on validation text."""

import numpy as np
import torch

from data.shards import open_corpus
from evaluation import subjects
from evaluation.subjects import open_corpus_of
from model import build, model_class
from research import sweep
from research.analysis import common, rank
from research.benchmarks.figures import Figures
from training import checkpoint, distributed, metrics
from training.memory import count_parameters
from training.residual_statistics import ObservedStream

WINDOWS, ROWS = 16, 8  # validation sequences that ranks and gates are measured over; at once
SHARES = 0.0, 0.25, 0.5, 1.0  # of training, at which the gates are looked at
NAMES = {"arm": "mgt_arm", "layers": "num_hidden_layers", "width": "hidden_size", "seed": "seed"}


def about(cell: sweep.Cell) -> dict:
    """What tells one row of a report from another, and the commit that trained it."""
    trained_at = checkpoint.read_state(checkpoint.find(cell.folder)).get("commit")
    return {**{name: cell.settings[key] for name, key in NAMES.items()}, "trained_at": trained_at}


def measure_rank(cells: list[sweep.Cell], figures: Figures) -> list[dict]:
    device, rows = distributed.pick_device("auto"), []
    for number, cell in enumerate(cells, 1):
        subject = subjects.find(str(cell.folder))
        if figures.find(weights=subject.identity) is None:
            corpus = open_corpus_of(subject, "")
            model, _, stem = subject.load(device)
            row = common.describe_run(subject, model, stem)
            row |= rank.measure_on_corpus(model, corpus, WINDOWS, ROWS, subject.label)
            del row["rank_state"], row["rank_read"]  # both are "rank": every arm reads its state
            first = rank.measure_on_corpus(initial_model(cell), corpus, WINDOWS, ROWS, cell.title)
            own = {"initial_rank": first["rank"], "weights": subject.identity}
            figures.add({**row, **about(cell), **own}, "weights")
            print(f"{number} of {len(cells)}: {rank.summarize(row)}", flush=True)
        rows.append(figures.find(weights=subject.identity))
    return rows


def measure_beta(cells: list[sweep.Cell], figures: Figures) -> list[dict]:
    rows = []
    for cell in cells:
        weights = subjects.find(str(cell.folder)).identity
        for share in SHARES:
            key = {"seed": cell.settings["seed"], "share": share, "weights": weights}
            if figures.find(**key) is None:
                model, step = model_at(cell, share)
                row = {**about(cell), **key, "step": step, **gates(model, cell.settings["dataset"])}
                figures.add(row, "seed", "share")
                print(f"{cell.title}: gates at step {step}", flush=True)
            rows.append(figures.find(**key))
    return rows


def initial_model(cell: sweep.Cell):
    """The model before its first step, made again from the seed."""
    state = checkpoint.read_state(checkpoint.find(cell.folder))
    torch.manual_seed(cell.settings["seed"])
    return build(state["model"], **state["model_config"]).to(distributed.pick_device("auto"))


def model_at(cell: sweep.Cell, share: float):
    """(the model after this share of training, its step)."""
    if share == 0:
        return initial_model(cell), 0
    wanted = share * cell.settings["max_steps"]
    stored = checkpoint.list_checkpoints(cell.folder)
    nearest = min(stored, key=lambda path: abs(checkpoint.get_step(path) - wanted))
    model, _, state = checkpoint.load_model(nearest, distributed.pick_device("auto"))
    return model, state["step"]


@torch.no_grad()
def gates(model, dataset: str) -> dict:
    """Of every block, over tokens, features and both sites: mean and variance of beta, and the share
    below 0; the mean of each site alone."""
    batches = common.open_validation_batches(model, open_corpus(dataset))
    windows = common.select_sequences(batches, WINDOWS)
    sites: dict[tuple[str, int], list] = {}

    def on_write(site, write):
        of = {name: values.double() for name, values in write.statistics.items()}
        square = of["beta_variance"] + of["beta"].square()
        moments = [float(x.mean()) for x in (of["beta"], square, of["beta_negative"])]
        sites.setdefault((site.name, site.layer), []).append(moments)

    for ids, _ in common.iterate_batches(batches, windows, ROWS, common.get_device(model)):
        with model.through(ObservedStream(on_write)):
            model(ids)
    layers = range(model.config.num_hidden_layers)
    moments = {
        name: np.array([np.mean(sites[name, layer], axis=0) for layer in layers])
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


def final_rows(cells: list[sweep.Cell], figures: Figures | None = None) -> list[dict]:
    """The last evaluation of every cell, and its size."""
    rows = []
    for cell in cells:
        final = sweep.read_final_evaluation(cell)
        scores = {key: value for key, value in final.items() if key.startswith("val_")}
        state = checkpoint.read_state(checkpoint.find(cell.folder))
        size = model_class(state["model"]).Config(**state["model_config"])
        parameters = count_parameters(state["model"], size)
        rows.append({**about(cell), "steps": final["step"], "parameters": parameters, **scores})
    return rows


def copy_rows(cells: list[sweep.Cell], figures: Figures | None = None) -> list[dict]:
    """With the first evaluation at which 99% of the answers were right in every character; None:
    none was."""
    rows = final_rows(cells)
    for row, cell in zip(rows, cells):
        records = [r for r in metrics.read(cell.folder / "metrics.jsonl") if "val_loss" in r]
        row["evaluations"] = [[r["step"], r["val_exact_match"], r["val_loss"]] for r in records]
        solved = (step for step, exact, _ in row["evaluations"] if exact >= 0.99)
        row["solved_at"] = next(solved, None)
    return rows


def course_rows(cells: list[sweep.Cell], figures: Figures | None = None) -> list[dict]:
    """Final rows with the course of the validation loss, and how many epochs each took to the
    target: the highest final loss of any run of its depth, which all of them reach."""
    rows = final_rows(cells)
    for row, cell in zip(rows, cells):
        records = metrics.read(cell.folder / "metrics.jsonl")
        tokens = checkpoint.read_state(checkpoint.find(cell.folder))["corpus"]["train"]["tokens"]
        scored = [r for r in records if "val_loss" in r]
        row["evaluations"] = [[r["step"], r["tokens"] / tokens, r["val_loss"]] for r in scored]
        losses = [[r["step"], r["loss"]] for r in records if "loss" in r]
        row["training"] = losses[:: max(len(records) // 500, 1)]
    for row in rows:
        row["target"] = max(each["val_loss"] for each in rows if each["layers"] == row["layers"])
        reached = (epochs for _, epochs, loss in row["evaluations"] if loss <= row["target"])
        row["epochs_to_target"] = next(reached)
    return rows
