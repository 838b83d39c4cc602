"""Evaluation on tasks during training: the values of eval.py, and no change to the training."""

import json
from pathlib import Path

import lm_eval_tasks
import pytest
from helpers import small_run
from in_process import call, train_in_processes
from training_runs import read_final_tensors, read_records

from training import checkpoint, downstream, metrics, plot, stopping

# imported here, and not in every fork of this process
pytest.importorskip("lm_eval.evaluator")

NAMES = ("questions", "endings", "texts")
# the tasks hold texts, for which the model is long enough
SETTINGS = {
    "block_size": 96,
    "max_steps": 4,
    "eval_interval": 4,
    "checkpoint_interval": 2,
    "keep_last": 9,
    "resume": "auto",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, object]:
    """Write local tasks, and return the keys that evaluate a run on them."""
    folder = lm_eval_tasks.write_tasks(tmp_path_factory.mktemp("tasks"), 30)
    return {
        "eval_tasks": ",".join(NAMES),
        "eval_tasks_path": folder,
        "eval_tasks_interval": 2,
        "eval_tasks_limit": 21,
    }


def train(corpus: Path, run: Path, num_ranks: int = 1, **keys) -> dict[int, dict]:
    """Train a run and return the values of its tasks by step."""
    arguments = small_run(corpus, run, **{**SETTINGS, **keys})
    if num_ranks > 1:
        train_in_processes(num_ranks, arguments, run.with_name(f"{run.name}_log"))
    else:
        result = call("train.py", *arguments)
        assert result.returncode == 0, result.stderr.decode()
    return {record["step"]: record["tasks"] for record in read_records(run) if "tasks" in record}


@pytest.fixture(scope="module")
def run(corpus, tasks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(corpus, folder, **tasks)
    return folder


def read_tasks(run: Path) -> dict[int, dict]:
    return {record["step"]: record["tasks"] for record in read_records(run) if "tasks" in record}


def evaluate_checkpoint(run: Path, step: int, tasks: dict, out: Path) -> dict[str, dict]:
    """Return the values that eval.py shows for a checkpoint."""
    result = call(
        "eval.py",
        run / "checkpoints" / f"step_{step:08d}",
        f"--tasks={','.join(NAMES)}",
        f"--include_path={tasks['eval_tasks_path']}",
        f"--limit={tasks['eval_tasks_limit']}",
        "--device=cpu",
        f"--out={out}",
    )
    assert result.returncode == 0, result.stderr.decode()
    [file] = out.glob("results_*.json")
    shown = json.loads(file.read_text())["shown"]
    return {name: {metric: value} for name, (metric, value, _) in shown.items()}


@pytest.mark.parametrize("step", [2, 4])
def test_the_values_are_those_of_eval_on_the_checkpoint(run, tasks, tmp_path, step):
    expected = evaluate_checkpoint(run, step, tasks, tmp_path / "eval")
    assert read_tasks(run)[step] == expected
    assert expected.keys() == set(NAMES)


def test_evaluation_on_tasks_changes_no_bit_of_the_training(run, corpus, tmp_path):
    train(corpus, tmp_path / "without")
    assert read_final_tensors(tmp_path / "without") == read_final_tensors(run)
    records = [record for record in read_records(run) if "tasks" not in record]
    assert records == read_records(tmp_path / "without")


def test_its_time_is_no_time_of_training(run):
    records = metrics.read(run / "metrics.jsonl")
    by_step = {record["step"]: record["seconds"] for record in records if "loss" in record}
    assert {by_step[record["step"]] - record["seconds"] for record in records} == {0.0}


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_ranks_have_the_values_of_eval_and_train_as_without_tasks(
    corpus, tasks, tmp_path, engine
):
    keys = {"engine": engine, "micro_batch_size": 1, "num_hidden_layers": 1, "max_steps": 2}
    values = train(corpus, tmp_path / "with", num_ranks=2, **keys, **tasks)
    expected = evaluate_checkpoint(tmp_path / "with", 2, tasks, tmp_path / "eval")
    for name in NAMES:
        assert values[2][name] == pytest.approx(expected[name], rel=1e-9)
    train(corpus, tmp_path / "without", num_ranks=2, **keys)
    assert read_final_tensors(tmp_path / "with") == read_final_tensors(tmp_path / "without")


def test_a_run_that_is_stopped_in_the_tasks_resumes_with_them(
    run, corpus, tasks, tmp_path, monkeypatch
):
    num_polls = 0

    def stop_at_fifth_poll(self) -> str | None:
        nonlocal num_polls
        num_polls += is_evaluating
        return "a test" if num_polls >= 5 else None

    is_evaluating = False
    evaluate = downstream.evaluate_tasks

    def evaluate_tasks(*arguments, **keys):
        nonlocal is_evaluating
        is_evaluating = True
        return evaluate(*arguments, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(stopping.Stop, "reason", stop_at_fifth_poll)
        patch.setattr(downstream, "evaluate_tasks", evaluate_tasks)
        result = call("train.py", *small_run(corpus, tmp_path / "run", **SETTINGS, **tasks))
    assert result.returncode == stopping.EXIT_CODE, result.stderr.decode()
    state = checkpoint.read_state(checkpoint.find(tmp_path / "run"))
    assert (state["step"], state["tasks_evaluated"]) == (2, False)
    assert not read_tasks(tmp_path / "run")
    train(corpus, tmp_path / "run", **tasks)
    assert read_records(tmp_path / "run") == read_records(run)
    assert read_final_tensors(tmp_path / "run") == read_final_tensors(run)


def test_a_task_that_cannot_be_loaded_ends_the_run_before_it_starts(corpus, tasks, tmp_path):
    (tmp_path / "absent.yaml").write_text(
        "task: absent\ndataset_path: json\ndataset_kwargs: {data_files: {test: nowhere.jsonl}}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: ''\ndoc_to_target: 0\n"
        "doc_to_choice: [a, b]\n"
    )
    keys = {"eval_tasks": "absent", "eval_tasks_path": tmp_path}
    result = call("train.py", *small_run(corpus, tmp_path / "run", **keys))
    assert result.returncode == 2
    [line] = result.stderr.decode().splitlines()
    assert "error: eval_tasks: task absent cannot be loaded (" in line
    assert not (tmp_path / "run").exists()


def test_the_plot_of_a_run_has_a_curve_for_each_task(run, tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.add_subplot()
    plot.draw_tasks(figure, metrics.read(run / "metrics.jsonl"))
    labels = [line.get_label() for line in figure.axes[1].lines]
    assert labels == ["questions acc_norm", "endings acc_norm", "texts word_perplexity"]
    assert list(figure.axes[1].lines[0].get_xdata()) == [2, 4]
