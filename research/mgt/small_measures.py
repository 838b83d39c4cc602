"""What experiments 1 and 3 of the MGT study measure of a trained run, beside its losses."""

from collections.abc import Callable
from pathlib import Path

import torch

from data.shards import open_corpus
from model import build
from model.block import Site, State, Stream
from model.gpt import GPT
from model.layers import Positions
from research.analysis import common
from research.analysis.rank import effective_rank
from training import checkpoint, model_folder

NUM_SEQUENCES = 16


def load_initial_model(folder: Path) -> GPT:
    """Return the model of a run before its first step, built again from the seed."""
    state = checkpoint.read_state(checkpoint.find(folder))
    torch.manual_seed(state["run_config"]["seed"])
    return build(state["model"], **state["model_config"])


def read_validation_ids(folder: Path, model: GPT) -> torch.Tensor:
    """Return NUM_SEQUENCES sequences, spread evenly over the validation split: (16, T)."""
    dataset = checkpoint.read_state(checkpoint.find(folder))["run_config"]["dataset"]
    batches = common.open_validation_batches(model, open_corpus(dataset))
    windows = common.select_sequences(batches, NUM_SEQUENCES)
    ids, _ = batches.get(windows, len(windows))
    return ids


# ---- experiment 1 ----


class StateRecorder(Stream):
    """Run the stream as it is, and keep the states before every block and after the last."""

    def __init__(self):
        self.states = []

    def read(
        self, site: Site, state: State, cache: dict | None, positions: Positions
    ) -> tuple[State, torch.Tensor, torch.Tensor | tuple]:
        if site.name == "attn":
            self.states.append(state)
        return super().read(site, state, cache, positions)

    def finish(self, model: GPT, state: State, cache: dict | None) -> torch.Tensor:
        self.states.append(state)
        return super().finish(model, state, cache)


def mean_cosine(x: torch.Tensor) -> torch.Tensor:
    """Return the mean cosine between different tokens of a sequence: x (B, T, d) -> (B,)."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    num_tokens = x.shape[1]
    pairs = unit @ unit.transpose(1, 2)  # (B, T, T), 1 on the diagonal
    return (pairs.sum((1, 2)) - num_tokens) / (num_tokens * (num_tokens - 1))


@torch.no_grad()
def measure_ranks(model: GPT, ids: torch.Tensor) -> dict[str, list[float]]:
    """Return, for depths 0 to L, means over sequences of the rank (eq. 8) and its companions.

    rank: of the hidden states (T, d) of a sequence. centered_rank: after their mean over tokens is
    subtracted. cosine: between different tokens.
    """
    recorder = StateRecorder()
    with model.through(recorder):
        model(ids)
    measured = {"rank": [], "centered_rank": [], "cosine": []}
    for state in recorder.states:
        centered = state - state.mean(1, keepdim=True)
        measured["rank"].append(effective_rank(state).mean().item())
        measured["centered_rank"].append(effective_rank(centered).mean().item())
        measured["cosine"].append(mean_cosine(state).mean().item())
    return {name: [round(value, 6) for value in values] for name, values in measured.items()}


def measure_rank_of_run(folder: Path) -> dict:
    """Return the ranks of the trained model, and of the untrained one as untrained_*."""
    trained, _, _ = model_folder.load_model(folder, torch.device("cpu"))
    ids = read_validation_ids(folder, trained)
    untrained = measure_ranks(load_initial_model(folder), ids)
    return {
        **measure_ranks(trained, ids),
        **{f"untrained_{name}": values for name, values in untrained.items()},
    }


# ---- experiment 3 ----


class GateRecorder(Stream):
    """Run the stream as it is, and add up what every write of a pre-norm arm does."""

    def __init__(self, num_layers: int):
        names = ("mean", "sign_varies", "erasure", "cosine")
        self.sums = {name: [0.0] * num_layers for name in names}

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        c: torch.Tensor,
        x_in: torch.Tensor | tuple,
        cache: dict | None,
    ) -> tuple[State, torch.Tensor | None]:
        new_state, extra_loss = super().write(site, state, h, c, x_in, cache)
        beta = site.write.compute_beta(state)  # (B, T, d)
        negative = (beta < 0).flatten(0, 1)
        cosine = torch.nn.functional.cosine_similarity(new_state - state, state, dim=-1)
        values = {
            "mean": beta.mean(),
            "sign_varies": (negative.any(0) & ~negative.all(0)).double().mean(),
            "erasure": (beta * site.write.alpha).mean(),
            "cosine": cosine.mean(),
        }
        for name, value in values.items():
            self.sums[name][site.layer] += value.item() / 2  # two sites per block
        return new_state, extra_loss


@torch.no_grad()
def measure_gates(model: GPT, ids: torch.Tensor) -> dict[str, list[float]]:
    """Return, for every block, means over tokens, features and both sites.

    mean: of beta, whose sign is not identified while alpha = 0. sign_varies: share of the features
    whose sign of beta differs between tokens, which no flip of a feature changes. erasure: of
    beta * alpha. cosine: between the update X' - X and X.
    """
    recorder = GateRecorder(model.config.num_hidden_layers)
    with model.through(recorder):
        model(ids)
    return {name: [round(value, 6) for value in values] for name, values in recorder.sums.items()}


def measure_beta_of_run(folder: Path) -> dict:
    """Return the gates of the untrained model and of every checkpoint: {"gates": {step: ...}}."""
    initial = load_initial_model(folder)
    ids = read_validation_ids(folder, initial)
    gates = {"0": measure_gates(initial, ids)}
    for path in checkpoint.list_checkpoints(folder):
        model, _, state = model_folder.load_model(path, torch.device("cpu"))
        gates[str(state["step"])] = measure_gates(model, ids)
    return {"gates": gates}


MEASURES: dict[str, Callable[[Path], dict]] = {
    "rank": measure_rank_of_run,
    "beta": measure_beta_of_run,
}
