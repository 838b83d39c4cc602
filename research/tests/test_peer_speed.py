"""`bench.py peers`: the speed of our models beside nanoGPT's own code and transformers."""

import json
import subprocess
import sys

import pyarrow.parquet
import pytest
import torch
from helpers import ROOT
from in_process import call

from research.benchmarks import peers

SIZE = {
    "vocab_size": 32,
    "block_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 64,
    "head_dim": 64,
}

# A model.py with what is used of nanoGPT's: it embeds a token and predicts the next one.
NANOGPT = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, ids, targets):
        logits = self.head(self.embedding(ids))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)

    def generate(self, ids, max_new_tokens):
        return ids
"""


@pytest.fixture
def nanogpt(tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    return peers.load_nanogpt(tmp_path)


def test_a_folder_without_nanogpt_is_refused(tmp_path):
    result = call("research/bench.py", "peers", f"--nanogpt={tmp_path}")
    assert result.returncode == 2
    assert "has no model.py; clone https://github.com/karpathy/nanoGPT" in result.stderr.decode()


def test_another_model_file_is_refused(tmp_path):
    (tmp_path / "model.py").write_text("class GPT:\n    pass\n")
    with pytest.raises(ValueError, match="is not that of nanoGPT"):
        peers.load_nanogpt(tmp_path)


def test_each_of_our_models_has_a_row_of_training(nanogpt):
    rows = peers.measure_training(nanogpt, SIZE, batch_size=2, rounds=1, compiled=False)
    pairs = [(row["here"], row["beside"]) for row in rows]
    assert pairs == [
        ("gpt-mha-rope", "nanoGPT"),
        ("DDL-gpt-mha-rope", "gpt-mha-rope"),
        ("DDL-gpt-mha-rope-CC-EC", "gpt-mha-rope"),
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_a_training_step_moves_every_parameter():
    batch = torch.randint(32, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    model = peers.build_ours("gpt-mha-rope", SIZE)
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = peers.make_training_step(
        model, [adamw], lambda model: None, tuple(batch), compiled=False
    )
    step()
    moved = {
        name for name, weight in model.named_parameters() if not torch.equal(weight, initial[name])
    }
    assert moved == set(initial)


def test_ratios_are_of_the_same_round():
    seconds = {"here": [1.0, 2.0, 4.0], "beside": [2.0, 2.0, 2.0]}
    [row] = peers.summarize("work", seconds, [("here", "beside")], num_tokens=10)
    assert (row["ratio"], row["ratio_least"], row["ratio_greatest"]) == (1.0, 0.5, 2.0)
    assert row["tokens_per_second"] == 5.0
    assert row["tokens_per_second_beside"] == 5.0


def test_an_unknown_part_is_refused(tmp_path):
    result = call("research/bench.py", "peers", f"--nanogpt={tmp_path}", "--only=training,evals")
    assert result.returncode == 2
    assert "evals: give some of training, generation, evaluation, preparation" in (
        result.stderr.decode()
    )


def test_both_evaluations_score_the_same_questions(monkeypatch):
    """measure_evaluation raises an error if their log-likelihoods differ."""
    monkeypatch.setattr(peers, "NUM_QUESTIONS", 3)
    rows = peers.measure_evaluation({**SIZE, "vocab_size": 320, "block_size": 256}, rounds=1)
    assert [row["beside"] for row in rows] == ["lm-eval's hf, batch 8", "lm-eval's hf, batch 32"]
    assert rows[0]["tokens_per_second"] > 0


def test_a_clock_counts_the_children_that_ended():
    start = peers.read_cpu_clock()
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
    assert peers.read_cpu_clock() > start


def test_documents_have_the_size_that_was_asked_for(tmp_path):
    path = tmp_path / "documents.parquet"
    peers.write_documents(path, 100_000)
    texts = pyarrow.parquet.read_table(path)["text"].to_pylist()
    assert len(texts) > 1
    assert 100_000 <= sum(len(text.encode()) for text in texts) < 101_000


# As nanoGPT's script does: it reads a data set of the hub, and writes what it has read beside itself.
NANOGPTS_PREPARATION = """
import os
from datasets import load_dataset
if __name__ == "__main__":
    total_batches = 1024
    texts = load_dataset("openwebtext", num_proc=8)["train"]["text"]
    with open(os.path.join(os.path.dirname(__file__), "train.bin"), "w") as file:
        file.write(f"{total_batches} {len(texts)}")
"""


def test_nanogpts_preparation_reads_the_documents_that_ours_reads(tmp_path):
    script = tmp_path / "nanogpt" / "data" / "openwebtext" / "prepare.py"
    script.parent.mkdir(parents=True)
    script.write_text(NANOGPTS_PREPARATION)
    documents = tmp_path / "documents.parquet"
    peers.write_documents(documents, 100_000)
    num_documents = pyarrow.parquet.read_metadata(documents).num_rows
    copy = tmp_path / "prepare.py"
    peers.copy_nanogpts_preparation(tmp_path / "nanogpt", copy)
    peers.run_python(tmp_path, "-c", peers.RUN_NANOGPTS_PREPARATION, copy, documents)
    assert (tmp_path / "train.bin").read_text() == f"1 {num_documents}"


def test_another_preparation_is_refused(tmp_path):
    script = tmp_path / "data" / "openwebtext" / "prepare.py"
    script.parent.mkdir(parents=True)
    script.write_text("print()")
    with pytest.raises(ValueError, match="is not nanoGPT's: it does not set total_batches"):
        peers.copy_nanogpts_preparation(tmp_path, tmp_path / "copy.py")


@pytest.mark.parametrize("name", ["peers_cpu", "peers_cpu_2_threads", "peers_cpu_512"])
def test_the_table_of_the_page_is_the_stored_result(name):
    rows = json.loads((ROOT / "results" / f"{name}.json").read_text())["rows"]
    page = (ROOT / "research" / "docs" / "speed.md").read_text(encoding="utf-8")
    assert peers.format_rows(rows) in page
