"""eval.py with its tasks' data on a hub, whose answers fail for a while."""

import io
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from export_helpers import build_noisy, save_run
from helpers import run_script
from hub_server import Fault, HubServer
from lm_eval_tasks import phrase

from data import hub as hub_module

pytest.importorskip("lm_eval")

from evaluation import tasks

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


def read_responses(out: Path, task: str) -> list:
    [file] = out.glob(f"samples_{task}_*.jsonl")
    return [json.loads(line)["filtered_resps"] for line in file.read_text().splitlines()]


def test_a_task_is_tried_again_and_one_that_is_not_there_is_named(hub, saved, tmp_path):
    """The model's responses are those to a task that reads the same rows from local files."""
    (tmp_path / "physical.yaml").write_text(OWN_TASK)
    (tmp_path / "absent.yaml").write_text(
        OWN_TASK.replace("baber/piqa", "nobody/has_this").replace("physical", "absent")
    )
    local = OWN_TASK.replace("baber/piqa", "parquet").replace("physical", "local")
    data_files = {}
    for split in ("train", "test"):
        file = tmp_path / f"{split}.parquet"
        file.write_bytes(make_questions(split, 25))
        data_files[split] = str(file)
    (tmp_path / "local.yaml").write_text(
        f"{local}dataset_kwargs: {json.dumps({'data_files': data_files})}\n"
    )
    hub.faults = [Fault("status", "/api/datasets/baber/piqa", 500, times=1)]
    result = evaluate(
        hub,
        saved,
        tmp_path / "out",
        "--tasks=physical,local,absent",
        f"--include_path={tmp_path}",
        "--shots=2",
    )
    assert result.returncode == 3, result.stderr.decode()
    retry_message, absent_message = result.stderr.decode().splitlines()
    expected_message = "task physical: the Hub responds with status 500; retrying in 1 s (9:"
    assert retry_message.startswith(expected_message)
    assert "task absent cannot be loaded (DatasetNotFound" in absent_message
    assert "nobody/has_this" in absent_message
    hub_responses = read_responses(tmp_path / "out", "physical")
    local_responses = read_responses(tmp_path / "out", "local")
    assert len(hub_responses) == 25
    assert hub_responses == local_responses


def test_patience_with_the_hub_ends_once_for_all_tasks(monkeypatch, capsys):
    """Tasks whose data set is on this machine are loaded nonetheless."""

    def load(names: list[str]) -> dict:
        if names != ["here"]:
            raise ConnectionError("down")
        return {"tasks": {}}

    clock = SimpleNamespace(seconds=0.0)

    def sleep(seconds: float) -> None:
        clock.seconds += seconds

    monkeypatch.setattr(
        hub_module, "time", SimpleNamespace(monotonic=lambda: clock.seconds, sleep=sleep)
    )
    monkeypatch.setattr(hub_module, "find_connection_problem", lambda: None)
    loaded, missing = tasks.load(["a", "b", "here"], SimpleNamespace(load=load, task_index={}), 5)
    assert [task.name for task in loaded] == ["here"]
    assert clock.seconds == 300
    assert "(ConnectionError: down); gave up after --retry_minutes=5)" in missing[0]
    assert "task b cannot be loaded" in missing[1]
    assert all(
        line.startswith("task a: ConnectionError") for line in capsys.readouterr().err.splitlines()
    )


def test_tasks_that_need_an_unreachable_hub_are_named_in_one_message(monkeypatch):
    """Tasks whose data set is on this machine are loaded nonetheless."""

    def load(names: list[str]) -> dict:
        if names != ["here"]:
            raise ConnectionError("offline")
        return {"tasks": {}}

    monkeypatch.setattr(hub_module, "find_connection_problem", lambda: "HUB cannot be reached")
    loaded, messages = tasks.load(["a", "here", "b"], SimpleNamespace(load=load), None)
    assert [task.name for task in loaded] == ["here"]
    [message] = messages
    assert message.startswith(
        "tasks a, b cannot be loaded: HUB cannot be reached, and the local cache"
    )
    assert "HF_HUB_OFFLINE=1" in message
    assert "--retry_minutes=10" in message


IMPATIENT = """import datetime, os, sys
sys.path.insert(0, os.getcwd())
from training import distributed
distributed.TIMEOUT = datetime.timedelta(seconds=6)
hubs, sys.argv[1:3] = sys.argv[1:3], []
os.environ["HF_ENDPOINT"] = hubs[int(os.environ["RANK"])]
os.environ["HF_HOME"] += os.environ["RANK"]
import eval
eval.main()
"""


@pytest.mark.slow
def test_all_processes_are_patient(hub, saved, tmp_path):
    """The hub of process 0 fails for longer than the processes' time-out.

    Process 1 has a hub of its own, as on another machine, which answers its first request with 503.
    """
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    (tmp_path / "physical.yaml").write_text(OWN_TASK)
    (tmp_path / "absent.yaml").write_text(
        OWN_TASK.replace("baber/piqa", "no/such").replace("physical", "absent")
    )
    # after pauses of 1, 2 and 4 s, the request at 7 s is the first one to be answered
    hub.faults = [Fault("status", "/api/datasets/baber/piqa", 500, seconds=6.5)]
    with HubServer() as second_hub:
        second_hub.commits = hub.commits
        second_hub.faults = [Fault("status", "/api/datasets/baber/piqa", times=1)]
        result = run_script(
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            tmp_path / "impatient.py",
            hub.url,
            second_hub.url,
            saved,
            f"--out={tmp_path / 'out'}",
            "--device=cpu",
            "--limit=3",
            "--tasks=absent,physical",
            f"--include_path={tmp_path}",
            "--retry_minutes=1",
            env={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": ""},
        )
    errors = result.stderr.decode()
    assert "task absent cannot be loaded" in errors, errors
    assert errors.count("the Hub responds with status 500; retrying in 1 s") == 1
    assert errors.count("the Hub responds with status 503; retrying in 1 s") == 1
    assert errors.count("task absent cannot be loaded") == 1
    [results] = (tmp_path / "out").glob("results_*.json")
    record = json.loads(results.read_text())
    assert record["n-samples"]["physical"]["effective"] == 3
