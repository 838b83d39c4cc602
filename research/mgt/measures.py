"""The rows of the MGT experiments: what is read from a run's folder or measured of its model."""

from typing import Any

import numpy as np
import torch

from data.shards import open_corpus
from evaluation import subjects
from evaluation.subjects import open_corpus_of
from model import build, model_class
from model.block import Site
from model.gpt import GPT
from research import sweep
from research.analysis import common, rank
from research.benchmarks.figures import Figures
from training import checkpoint, distributed, metrics, model_folder
from training.memory import count_parameters
from training.residual_statistics import ObservedStream, SiteWrite

NUM_SEQUENCES = 16  # validation sequences over which ranks and gates are measured
BATCH_SIZE = 8
TRAINING_FRACTIONS = (0.0, 0.25, 0.5, 1.0)  # after which experiment 3 measures the gates
SOLVED_ACCURACY = 0.99  # of exact answers, from which on the copy task is solved
MAX_CURVE_POINTS = 500


def describe_cell(cell: sweep.Cell) -> dict[str, Any]:
    """Return what distinguishes a row from others, and the commit of the code that trained it."""
    return {
        "arm": cell.settings["mgt_arm"],
        "layers": cell.settings["num_hidden_layers"],
        "width": cell.settings["hidden_size"],
        "seed": cell.settings["seed"],
        "trained_at": checkpoint.read_state(checkpoint.find(cell.folder)).get("commit"),
    }


# ---- models ----


def load_initial_model(cell: sweep.Cell) -> GPT:
    """Return the model of a run before its first step, built again from the seed."""
    state = checkpoint.read_state(checkpoint.find(cell.folder))
    torch.manual_seed(cell.settings["seed"])
    return build(state["model"], **state["model_config"]).to(distributed.pick_device("auto"))


def load_model_at(cell: sweep.Cell, training_fraction: float) -> tuple[GPT, int]:
    """Return the model after a fraction of its training, and the step of its checkpoint."""
    if training_fraction == 0:
        return load_initial_model(cell), 0
    step = training_fraction * cell.settings["max_steps"]
    nearest_checkpoint = min(
        checkpoint.list_checkpoints(cell.folder),
        key=lambda path: abs(checkpoint.get_step(path) - step),
    )
    model, _, state = model_folder.load_model(nearest_checkpoint, distributed.pick_device("auto"))
    return model, state["step"]


# ---- 1: effective rank ----


def measure_rank(cells: list[sweep.Cell], figures: Figures) -> list[dict]:
    """Return the ranks of each cell's model, trained and untrained, and store them in figures."""
    device = distributed.pick_device("auto")
    rows = []
    for number, cell in enumerate(cells, 1):
        subject = subjects.find(str(cell.folder))
        if figures.find(weights=subject.identity) is None:
            corpus = open_corpus_of(subject, "")
            model, _, model_name = subject.load(device)
            trained = rank.measure_on_corpus(
                model, corpus, NUM_SEQUENCES, BATCH_SIZE, subject.label
            )
            # both equal "rank", because every arm reads its state as it is
            del trained["rank_state"], trained["rank_read"]
            untrained = rank.measure_on_corpus(
                load_initial_model(cell), corpus, NUM_SEQUENCES, BATCH_SIZE, cell.title
            )
            row = {
                **common.describe_run(subject, model, model_name),
                **trained,
                **describe_cell(cell),
                "initial_rank": untrained["rank"],
                "weights": subject.identity,
            }
            figures.add(row, "weights")
            print(f"{number} of {len(cells)}: {rank.summarize(row)}", flush=True)
        rows.append(figures.find(weights=subject.identity))
    return rows


# ---- 3: the gate beta ----


def measure_beta(cells: list[sweep.Cell], figures: Figures) -> list[dict]:
    """Return the gates of each cell at four moments of its training, and store them in figures."""
    rows = []
    for cell in cells:
        seed = cell.settings["seed"]
        weights = subjects.find(str(cell.folder)).identity
        for fraction in TRAINING_FRACTIONS:
            row = figures.find(seed=seed, training_fraction=fraction, weights=weights)
            if row is None:
                model, step = load_model_at(cell, fraction)
                figures.add(
                    {
                        **describe_cell(cell),
                        "seed": seed,
                        "training_fraction": fraction,
                        "weights": weights,
                        "step": step,
                        **measure_gates(model, cell.settings["dataset"]),
                    },
                    "seed",
                    "training_fraction",
                )
                print(f"{cell.title}: gates at step {step}", flush=True)
                row = figures.find(seed=seed, training_fraction=fraction, weights=weights)
            rows.append(row)
    return rows


@torch.no_grad()
def measure_gates(model: GPT, dataset: str) -> dict[str, list]:
    """Return statistics of beta for each block, over tokens and features.

    "mean", "variance" and "negative", the fraction below 0, are those of both sites together, and
    "mean_attn" and "mean_mlp" those of one. "sign_changes" lists the blocks at which the mean has
    another sign than at the block before.
    """
    batches = common.open_validation_batches(model, open_corpus(dataset))
    sequences = common.select_sequences(batches, NUM_SEQUENCES)
    # of each site, for each batch: means of beta, of its square, and of whether it is below 0
    batch_moments: dict[tuple[str, int], list[list[float]]] = {}

    def record_moments(site: Site, write: SiteWrite) -> None:
        beta = write.statistics["beta"].double()
        variance = write.statistics["beta_variance"].double()
        negative = write.statistics["beta_negative"].double()
        square = variance + beta.square()
        batch_moments.setdefault((site.name, site.layer), []).append(
            [float(beta.mean()), float(square.mean()), float(negative.mean())]
        )

    device = common.get_device(model)
    for ids, _ in common.iterate_batches(batches, sequences, BATCH_SIZE, device):
        with model.through(ObservedStream(record_moments)):
            model(ids)

    # (blocks, 3) for each kind of site
    layers = range(model.config.num_hidden_layers)
    attn = np.array([np.mean(batch_moments["attn", layer], axis=0) for layer in layers])
    mlp = np.array([np.mean(batch_moments["mlp", layer], axis=0) for layer in layers])
    mean, square, negative = ((attn + mlp) / 2).T
    return {
        "mean": mean.tolist(),
        "variance": (square - mean**2).tolist(),
        "negative": negative.tolist(),
        "mean_attn": attn[:, 0].tolist(),
        "mean_mlp": mlp[:, 0].tolist(),
        "sign_changes": find_sign_changes(mean.tolist()),
    }


def find_sign_changes(means: list[float]) -> list[int]:
    """Return the blocks, from 0, whose mean has another sign than that of the block before."""
    return [layer for layer in range(1, len(means)) if (means[layer] < 0) != (means[layer - 1] < 0)]


# ---- losses ----


def read_final_rows(cells: list[sweep.Cell], figures: Figures | None = None) -> list[dict]:
    """Return the last evaluation of every cell and the size of its model."""
    rows = []
    for cell in cells:
        evaluation = sweep.read_final_evaluation(cell)
        state = checkpoint.read_state(checkpoint.find(cell.folder))
        model_config = model_class(state["model"]).Config(**state["model_config"])
        rows.append(
            {
                **describe_cell(cell),
                "steps": evaluation["step"],
                "parameters": count_parameters(state["model"], model_config),
                **{key: value for key, value in evaluation.items() if key.startswith("val_")},
            }
        )
    return rows


def read_copy_rows(cells: list[sweep.Cell], figures: Figures | None = None) -> list[dict]:
    """Return the final rows with all evaluations and "solved_at".

    "solved_at" is the step of the first evaluation at which 99% of the answers were right in every
    character; None if there was none.
    """
    rows = read_final_rows(cells)
    for row, cell in zip(rows, cells):
        records = metrics.read(cell.folder / "metrics.jsonl")
        row["evaluations"] = [
            [record["step"], record["val_exact_match"], record["val_loss"]]
            for record in records
            if "val_loss" in record
        ]
        row["solved_at"] = None
        for step, accuracy, _ in row["evaluations"]:
            if accuracy >= SOLVED_ACCURACY:
                row["solved_at"] = step
                break
    return rows


def read_curve_rows(cells: list[sweep.Cell], figures: Figures | None = None) -> list[dict]:
    """Return the final rows with the curves of both losses, and the epochs to the target loss.

    The target is the highest final loss of any run of that depth, which all of them reach.
    """
    rows = read_final_rows(cells)
    for row, cell in zip(rows, cells):
        state = checkpoint.read_state(checkpoint.find(cell.folder))
        tokens_per_epoch = state["corpus"]["train"]["tokens"]
        records = metrics.read(cell.folder / "metrics.jsonl")
        row["evaluations"] = [
            [record["step"], record["tokens"] / tokens_per_epoch, record["val_loss"]]
            for record in records
            if "val_loss" in record
        ]
        losses = [[record["step"], record["loss"]] for record in records if "loss" in record]
        row["training"] = losses[:: max(len(records) // MAX_CURVE_POINTS, 1)]
    for row in rows:
        row["target"] = max(other["val_loss"] for other in rows if other["layers"] == row["layers"])
        row["epochs_to_target"] = next(
            epochs for _, epochs, loss in row["evaluations"] if loss <= row["target"]
        )
    return rows
