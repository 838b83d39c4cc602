"""The figures of every run of the MGT experiments: what its folder says, and what its model does on validation text."""

import numpy as np
import torch

from data.loader import ValidationBatches
from data.shards import open_corpus
from data.windows import Windows
from evaluation import subjects
from model import build, model_class
from research import sweep
from research.analysis import rank
from research.analysis.common import whole_windows
from research.benchmarks.figures import Figures
from training import checkpoint, distributed, metrics
from training.memory import parameters_of
from training.residual_statistics import Watched

WINDOWS, ROWS = 16, 8  # validation sequences that ranks and gates are measured over; at once
SHARES = 0.0, 0.25, 0.5, 1.0  # of training, at which the gates are looked at


def about(cell: sweep.Cell) -> dict:
    """What tells one row of a report from another, and the commit that trained it."""
    names = {
        "arm": "mgt_arm",
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "seed": "seed",
    }
    trained_at = checkpoint.read_state(checkpoint.find(cell.folder)).get("commit")
    return {**{name: cell.settings[key] for name, key in names.items()}, "trained_at": trained_at}


def measure_rank(cells: list[sweep.Cell], figures: Figures) -> list[dict]:
    device, wanted = distributed.pick_device("auto"), []
    for number, cell in enumerate(cells, 1):
        subject = subjects.find(str(cell.folder))
        wanted.append(subject.identity)
        if figures.find(weights=subject.identity) is None:
            row = rank.measure_run(subject, "", WINDOWS, ROWS, device)
            del (
                row["rank_state"],
                row["rank_read"],
            )  # both are "rank": every arm reads its state as it is
            corpus = open_corpus(cell.settings["dataset"])
            first = rank.over_validation(initial_model(cell), corpus, WINDOWS, ROWS, cell.title)
            own = {"initial_rank": first["rank"], "weights": subject.identity}
            figures.add({**row, **about(cell), **own}, "weights")
            print(f"{number} of {len(cells)}: {rank.line_of(row)}", flush=True)
    return [figures.find(weights=identity) for identity in wanted]


def measure_beta(cells: list[sweep.Cell], figures: Figures) -> list[dict]:
    wanted = []
    for cell in cells:
        for share in SHARES:
            key = {"seed": cell.settings["seed"], "share": share}
            digest = subjects.find(str(cell.folder)).identity
            if figures.find(**key, weights=digest) is None:
                model, step = model_at(cell, share)
                found = gates(model, cell.settings["dataset"])
                figures.add(
                    {**about(cell), **key, "step": step, "weights": digest, **found},
                    "seed",
                    "share",
                )
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
    batches = ValidationBatches(
        corpus.val, config.block_size, config.vocab_size, Windows.of(corpus.meta)
    )
    windows = whole_windows(batches, WINDOWS)
    sites: dict[tuple[str, int], list] = {}

    def seen(site, quantities):
        found = quantities["statistics"]
        mean, variance = found["beta"].double(), found["beta_variance"].double()
        moments = [
            mean.mean(),
            (variance + mean.square()).mean(),
            found["beta_negative"].double().mean(),
        ]
        sites.setdefault((site.name, site.layer), []).append([float(x) for x in moments])

    for first in range(0, len(windows), ROWS):
        chunk = windows[first : first + ROWS]
        ids, _ = batches.get(chunk, len(chunk))
        with model.through(Watched(seen)):
            model(ids.to(model.transformer.wte.weight.device))
    moments = {
        name: np.array(
            [np.mean(sites[name, layer], axis=0) for layer in range(config.num_hidden_layers)]
        )
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


def final_rows(cells: list[sweep.Cell]) -> list[dict]:
    """The last evaluation of every cell, and its size."""
    rows = []
    for cell in cells:
        final = sweep.final_evaluation(cell)
        figures = {key: value for key, value in final.items() if key.startswith("val_")}
        rows.append(
            {**about(cell), "steps": final["step"], "parameters": parameters(cell), **figures}
        )
    return rows


def parameters(cell: sweep.Cell) -> int:
    state = checkpoint.read_state(checkpoint.find(cell.folder))
    return parameters_of(
        state["model"], model_class(state["model"]).Config(**state["model_config"])
    )


def copy_rows(cells: list[sweep.Cell]) -> list[dict]:
    """With the first evaluation at which 99% of the answers were right in every character; None: none was."""
    rows = final_rows(cells)
    for row, cell in zip(rows, cells):
        records = [
            record for record in metrics.read(cell.folder / "metrics.jsonl") if "val_loss" in record
        ]
        row["evaluations"] = [[r["step"], r["val_exact_match"], r["val_loss"]] for r in records]
        row["solved_at"] = next(
            (step for step, exact, _ in row["evaluations"] if exact >= 0.99), None
        )
    return rows


def course_rows(cells: list[sweep.Cell]) -> list[dict]:
    """Final rows with the course of the validation loss, and how many epochs each took to the target: the highest final
    loss of any run of its depth, which all of them reach."""
    rows = final_rows(cells)
    for row, cell in zip(rows, cells):
        records = metrics.read(cell.folder / "metrics.jsonl")
        tokens = checkpoint.read_state(checkpoint.find(cell.folder))["corpus"]["train"]["tokens"]
        row["evaluations"] = [
            [r["step"], r["tokens"] / tokens, r["val_loss"]] for r in records if "val_loss" in r
        ]
        row["training"] = [[r["step"], r["loss"]] for r in records if "loss" in r][
            :: max(len(records) // 500, 1)
        ]
    for row in rows:
        row["target"] = max(other["val_loss"] for other in rows if other["layers"] == row["layers"])
        row["epochs_to_target"] = next(
            epochs for _, epochs, loss in row["evaluations"] if loss <= row["target"]
        )
    return rows
