"""eval.py with its tasks' data on a hub, whose answers fail for a while."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import run_script
from hub_server import Fault, HubServer
from hub_tasks import repositories

from data import hub as hub_module
from data import tokenizer
from model import build
from model.causality import move_parameters
from training import checkpoint

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

import export
from evaluation import tasks
from evaluation.tasks import PAPER_METRICS

TINY = {
    "vocab_size": 328,
    "block_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
}
TINY |= {"hidden_size": 12}
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


@pytest.fixture(scope="module")
def hub(server):
    for name, files in repositories(25):
        server.commits.pop(name, None)
        server.commit(name, files)
    yield server
    server.faults = []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a small model of random weights, and the exported folder of it."""
    root = tmp_path_factory.mktemp("run")
    encoding = tokenizer.train_byte_pairs(["the cat and the dog. Question: Answer: " * 20], 270)
    model = move_parameters(build("DDL-gpt-mha-rope-CC-EC", **TINY))
    state = {"step": 1, "seconds": 0.0, "model": "DDL-gpt-mha-rope-CC-EC"}
    state |= {"model_config": dataclasses.asdict(model.config), "run_config": {}, "corpus": {}}
    found = checkpoint.save(
        root, checkpoint.get_model_tensors(model), {}, state, tokenizer.to_json(encoding)
    )
    (root / "exported").mkdir()
    export.write(root / "exported", "exported", found, "float32")
    return found, root / "exported"


def evaluate(hub, saved, out, *arguments):
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(out / "hf"), "HF_HUB_OFFLINE": ""}
    return run_script(
        "eval.py", saved, f"--out={out}", "--device=cpu", "--log_samples", *arguments, env=env
    )


def samples(out, task) -> list[dict]:
    (file,) = out.glob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_task_is_tried_again_and_one_that_is_not_there_is_named(hub, saved, tmp_path):
    """Its items are those of a task that reads the same rows from local files."""
    (tmp_path / "physical.yaml").write_text(OWN_TASK)
    (tmp_path / "absent.yaml").write_text(
        OWN_TASK.replace("baber/piqa", "nobody/has_this").replace("physical", "absent")
    )
    local = OWN_TASK.replace("baber/piqa", "parquet").replace("physical", "local")
    data_files = {}
    for split in ("train", "test"):
        data_files[split] = str(tmp_path / f"{split}.parquet")
        (content,) = (
            c
            for p, c in next(iter(hub.commits["baber/piqa"].values())).items()
            if f"/{split}-" in p
        )
        Path(data_files[split]).write_bytes(content)
    (tmp_path / "local.yaml").write_text(
        f"{local}dataset_kwargs: {json.dumps({'data_files': data_files})}\n"
    )
    hub.faults = [Fault("status", "/api/datasets/baber/piqa", 500, times=1)]
    arguments = ["--tasks=physical,local,absent", f"--include_path={tmp_path}", "--shots=2"]
    result = evaluate(hub, saved[0], tmp_path / "out", *arguments)
    assert result.returncode == 3, result.stderr.decode()
    tried, absent = result.stderr.decode().splitlines()
    assert tried == "task physical: the Hub responds with status 500; retrying in 1 s"
    assert "task absent is skipped: its dataset nobody/has_this cannot be loaded" in absent
    assert "the Hub has no such dataset, or it is private or gated" in absent
    mine, other = (
        [each["filtered_resps"] for each in samples(tmp_path / "out", name)]
        for name in ("physical", "local")
    )
    assert len(mine) == 25
    assert mine == other


def test_minutes_out_of_range_are_refused_before_the_hub_is_asked():
    with pytest.raises(ValueError, match=r"^--retry_minutes=-1: give 0 or more$"):
        tasks.load_all(["piqa"], None, SimpleNamespace(world_size=1, is_main=True), -1)


def test_patience_with_the_hub_ends_once_for_all_tasks(monkeypatch, capsys):
    """Tasks whose data set is at hand are loaded none the less."""

    def load(names):
        if names != ["here"]:
            raise ConnectionError("down")
        return {"tasks": {}}

    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda pause: now.__setitem__(0, now[0] + pause)
    )
    monkeypatch.setattr(hub_module, "time", clock)
    loaded, missing = tasks.load(["a", "b", "here"], SimpleNamespace(load=load, task_index={}), 5)
    assert [task.name for task in loaded] == ["here"]
    assert now[0] == 300
    assert (
        "(ConnectionError: down); gave up after --retry_minutes=5); rerun the same command"
        in missing[0]
    )
    assert "task b is skipped" in missing[1]
    assert all(
        line.startswith("task a: ConnectionError") for line in capsys.readouterr().err.splitlines()
    )


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
    """Process 0 with a hub that is down for longer than the processes' time-out; 1, as on
    a machine of its own, with a 503 to its first question."""
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    (tmp_path / "physical.yaml").write_text(OWN_TASK)
    (tmp_path / "absent.yaml").write_text(
        OWN_TASK.replace("baber/piqa", "no/such").replace("physical", "absent")
    )
    # and 7 with the pauses
    hub.faults = [Fault("status", "/api/datasets/baber/piqa", 500, seconds=6.5)]
    with HubServer() as other:
        other.commits = hub.commits
        other.faults = [Fault("status", "/api/datasets/baber/piqa", times=1)]
        several = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            tmp_path / "impatient.py",
        ]
        arguments = [
            hub.url,
            other.url,
            saved[0],
            f"--out={tmp_path / 'out'}",
            "--device=cpu",
            "--limit=3",
        ]
        arguments += ["--tasks=absent,physical", f"--include_path={tmp_path}", "--retry_minutes=1"]
        env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": ""}
        result = run_script(*several, *arguments, env=env)
    errors = result.stderr.decode()
    assert "task absent is skipped" in errors, errors
    assert errors.count("the Hub responds with status 500; retrying in 1 s") == 1
    assert errors.count("the Hub responds with status 503; retrying in 1 s") == 1
    assert errors.count("absent is skipped") == 1
    (entry,) = json.loads((tmp_path / "out" / "results.json").read_text())["entries"]
    assert entry["n-samples"]["physical"]["effective"] == 3


@pytest.mark.slow
def test_the_eight_tasks_equal_lm_evals_own_model(hub, saved, tmp_path):
    """Two shots, with a 503 to the first question about each data set."""
    hub.faults = [Fault("status", f"/api/datasets/{name}", times=1) for name, _ in repositories(1)]
    result = evaluate(hub, saved[0], tmp_path, "--tasks=paper", "--shots=2")
    assert result.returncode == 0, result.stderr.decode()
    assert result.stderr.decode().count("the Hub responds with status 503; retrying in 1 s") >= 5
    hub.faults = []
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    theirs = run_script("tests/lm_evals_hf.py", saved[1], 2, *PAPER_METRICS, env=env)
    assert theirs.returncode == 0, theirs.stderr.decode()
    wanted = json.loads(theirs.stdout.splitlines()[-1])
    entries = {
        entry["task"]: entry
        for entry in json.loads((tmp_path / "results.json").read_text())["entries"]
    }
    largest = 0.0
    for name in PAPER_METRICS:
        for mine, other in zip(samples(tmp_path, name), wanted["samples"][name], strict=True):
            assert mine["doc_id"] == other["doc_id"]
            for (nats, greedy), (expected, also) in zip(
                mine["filtered_resps"], other["filtered_resps"], strict=True
            ):
                largest = max(largest, abs(float(nats) - expected))
                assert str(greedy) == str(also)
            assert mine["acc"] == other["acc"]
        for key, value in wanted["results"][name].items():
            if "," in key and "stderr" not in key:
                assert entries[name]["results"][name][key] == pytest.approx(value, rel=1e-5), (
                    name,
                    key,
                )
    assert largest < 1e-4
    print(f"largest difference {largest:.2g} nats")
