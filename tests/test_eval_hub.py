"""eval.py with its tasks' data on a hub."""

import io
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from export_helpers import build_noisy, save_run
from helpers import run_script
from hub_server import HubServer
from lm_eval_tasks import phrase

pytest.importorskip("lm_eval")

OWN_TASK = """task: physical
dataset_path: baber/piqa
output_type: multiple_choice
test_split: test
fewshot_split: train
doc_to_text: "Question: {{goal}}\\nAnswer:"
doc_to_target: label
doc_to_choice: "{{[sol1, sol2]}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def make_questions(split: str, count: int) -> bytes:
    """Return a Parquet file of random questions with two answers each."""
    draw = random.Random(split)
    rows = [
        {
            "goal": phrase(draw, 3, 9),
            "sol1": phrase(draw, 3, 9),
            "sol2": phrase(draw, 3, 9),
            "label": draw.randrange(2),
        }
        for _ in range(count)
    ]
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), content)
    return content.getvalue()


@pytest.fixture(scope="module")
def hub(server) -> Iterator[HubServer]:
    names = ("train", "test")
    files = {f"data/{split}-00000-of-00001.parquet": make_questions(split, 25) for split in names}
    server.commit("baber/piqa", files)
    yield server
    server.faults = []


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Save a small model of random weights as a run."""
    model_name = "DDL-gpt-mha-rope-CC-EC"
    model = build_noisy(model_name, {"block_size": 512})
    return save_run(tmp_path_factory.mktemp("runs") / "run", model, model_name)


def evaluate(hub: HubServer, run: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run eval.py on a run, with data sets from the hub."""
    return run_script(
        "eval.py",
        run,
        f"--out={out}",
        "--device=cpu",
        "--log_samples",
        *arguments,
        env={"HF_ENDPOINT": hub.url, "HF_HOME": str(out / "hf"), "HF_HUB_OFFLINE": ""},
    )


def read_responses(out: Path, task: str) -> list[float]:
    """Return the log-likelihoods of all choices."""
    [file] = out.glob(f"samples_{task}_*.jsonl")
    items = [json.loads(line) for line in file.read_text().splitlines()]
    return [float(nats) for item in items for nats, _ in item["filtered_resps"]]


def test_a_task_on_the_hub_equals_one_of_local_files(hub, saved, tmp_path):
    """The model's responses are those to a task that reads the same rows from local files."""
    (tmp_path / "physical.yaml").write_text(OWN_TASK)
    local = OWN_TASK.replace("baber/piqa", "parquet").replace("physical", "local")
    data_files = {}
    for split in ("train", "test"):
        file = tmp_path / f"{split}.parquet"
        file.write_bytes(make_questions(split, 25))
        data_files[split] = str(file)
    (tmp_path / "local.yaml").write_text(
        f"{local}dataset_kwargs: {json.dumps({'data_files': data_files})}\n"
    )
    result = evaluate(
        hub,
        saved,
        tmp_path / "out",
        "--tasks=physical,local",
        f"--include_path={tmp_path}",
        "--shots=2",
    )
    assert result.returncode == 0, result.stderr.decode()
    hub_responses = read_responses(tmp_path / "out", "physical")
    local_responses = read_responses(tmp_path / "out", "local")
    assert len(hub_responses) == 2 * 25
    # the batches of a request may differ
    assert hub_responses == pytest.approx(local_responses, rel=1e-6)
