"""The paper's results: what results/published.csv holds, and what is shown beside a model."""

import math

import pytest
from helpers import configure
from models import PAPER

from evaluation import comparison, published, tasks

CORPUS = {"source": "HuggingFaceFW/fineweb-edu", "sha256": "1"}


def find(config: str, *options: str, step: int | None = None) -> published.Published:
    """Return the paper's results for a run of a config file, which has trained to its end."""
    run, model = configure([f"config/{config}.py", *options])
    state = {
        "model": run.model,
        "step": run.max_steps if step is None else step,
        "run_config": vars(run),
        "model_config": vars(model),
        "corpus": CORPUS,
    }
    return published.find(run.model, model, state)


# ---- results/published.csv ----


def test_the_file_has_every_model_in_both_sizes():
    """It was compared number by number with the tables of both versions when it was made."""
    results = published.read_results()
    assert results.keys() == {(variant, size) for variant in PAPER for size in published.SIZES}
    assert all(by_shots.keys() == {"", "0", "1"} for by_shots in results.values())
    assert sum(len(row) for by_shots in results.values() for row in by_shots.values()) == 273
    assert results["gpt-mha-rope", "small"][""]["train_ktok_per_s"] == 1509.6
    assert results["DDL-gpt-mha-rope-CC-EC", "medium"]["1"]["sciq"] == 90.5


def test_every_published_average_is_that_of_its_row():
    for by_shots in published.read_results().values():
        for shots in ("0", "1"):
            values = {task: (by_shots[shots][task], None) for task in tasks.PAPER_METRICS}
            average, _ = comparison.compute_average(values)
            assert average == pytest.approx(by_shots[shots]["average"], abs=0.0101)


# ---- beside a run ----


@pytest.mark.parametrize("size", published.SIZES)
@pytest.mark.parametrize("variant", PAPER)
def test_a_run_of_the_papers_text_has_its_row_and_no_differences(variant, size):
    paper = find(f"{published.CONFIG_NAMES[variant]}_{size}")
    assert paper.results == published.read_results()[variant, size]
    remark = ""
    if variant.endswith(("-CC", "-EC")):  # January has no losses of these
        remark = "The paper's loss of run is that of its July text (ddl_v_input=context)."
    assert paper.remark("run") == remark


@pytest.mark.parametrize(
    ("options", "differences"),
    [
        (["--learning_rate=2e-3"], "learning_rate=0.002 (paper: 0.001)"),
        (["--max_steps=50000"], "max_steps=50000 (paper: 100000)"),
        (["--dataset=other"], "dataset=other (paper: fineweb_edu)"),
        (["--ddl_update=write_only"], "ddl_update=write_only (paper: delta)"),
        (
            ["--warmup_steps=10", "--ddl_v_input=context"],
            "warmup_steps=10 (paper: 2000), ddl_v_input=context (paper: residual)",
        ),
    ],
)
def test_settings_that_differ_are_named(options, differences):
    assert find("ddl_dv4_small", *options).remark("run") == (
        f"Settings of run that differ from the paper's (config/ddl_dv4_small.py): {differences}."
    )


def test_settings_that_the_paper_leaves_open_are_not_named():
    options = ["--seed=7", "--micro_batch_size=4", "--compile=False", "--engine=fsdp"]
    options += ["--dataset=/data/fineweb_edu", "--out_dir=runs/other"]
    assert find("gpt_small", *options).remark("run") == ""


def test_an_unfinished_run_is_named():
    remark = find("gpt_small", step=50_000).remark("run")
    assert remark.endswith(": trained for 50,000 of max_steps=100000.")


def test_a_model_that_the_paper_does_not_have_has_no_row():
    other_size = find("ddl_dv4_small", "--num_hidden_layers=6")
    assert other_size.results == {}
    assert other_size.remark("run") == (
        "The paper reports no results for run (DDL-gpt-mha-rope with 6 layers and hidden_size=768)."
    )
    assert find("conv_small").results == {}


def test_a_folder_that_does_not_say_how_it_was_trained():
    run, model = configure(["config/ddl_dv4_small.py", "--ddl_v_input=context"])
    paper = published.find(run.model, model, {}, val_dataset="openwebtext")
    assert paper.results == published.read_results()[run.model, "small"]
    assert paper.remark("exported") == (
        "Settings of exported that differ from the paper's (config/ddl_dv4_small.py): "
        "ddl_v_input=context (paper: residual), it is not known how it was trained, validated on "
        "openwebtext (paper: fineweb_edu)."
    )


# ---- the table of eval.py ----


def make_record(shots: int, values: dict[str, tuple[float, float | None]], **changes) -> dict:
    """Return a record of eval.py with results of tasks."""
    shown = [
        tasks.Result(task, shots, tasks.PAPER_METRICS.get(task, "acc"), *value)._asdict()
        for task, value in values.items()
    ]
    settings = {"dtype": "float32", "limit": None}
    return {"label": "a", "weights": "1", "settings": settings, "shown": shown, **changes}


def test_one_table_has_the_papers_numbers_beside_those_of_the_model():
    # 30, 31, ... with errors 1, 2, ...
    values = {task: (30.0 + index, 1.0 + index) for index, task in enumerate(tasks.PAPER_METRICS)}
    validation = {
        "label": "a",
        "weights": "1",
        "settings": {"dtype": "float32", "limit": None},
        "dataset": "fineweb_edu",
        "validation": {"val_loss": 2.9, "val_perplexity": 18.2},
    }
    records = [
        validation,
        make_record(0, {"lambada": (1.0, 0.5), "arc_easy": (40.0, None)}),
        make_record(1, values),
        make_record(1, {"arc_easy": (1.5, None)}, label="b", weights="2"),
    ]
    papers = {"1": find("gpt_small", "--beta1=0.95"), "2": find("conv_small")}
    table = comparison.format_table(records, papers)
    lines = [" ".join(line.split()) for line in table.splitlines()]
    mean_error = math.sqrt(sum(number**2 for number in range(1, 9))) / 8
    assert lines[0] == "| | shots | a | published | b |"
    assert lines[2:5] == [
        "| arc_easy (acc_norm) | 0 | 40.00 | 52.44 | - |",
        "| lambada (acc) | 0 | 1.00 ± 0.50 | - | - |",
        "| arc_challenge (acc_norm) | 1 | 30.00 ± 1.00 | 29.01 | - |",
    ]
    assert "| arc_easy (acc_norm) | 1 | 31.00 ± 2.00 | 55.85 | 1.50 |" in lines
    assert f"| average (of the eight) | 1 | 33.50 ± {mean_error:.2f} | 48.56 | - |" in lines
    assert "| loss (nats/token), fineweb_edu | - | 2.9000 | 2.8543 | - |" in lines
    assert "| perplexity, fineweb_edu | - | 18.2000 | 17.3616 | - |" in lines
    assert lines[-3] == "Computed in float32."
    assert lines[-1].endswith("beta1=0.95 (paper: 0.9).")
