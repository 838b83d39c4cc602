"""The paper's results: what results/published.csv holds, and what is shown beside a model."""

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
            average, _ = comparison.compute_average(values)["average"]
            assert average == pytest.approx(by_shots[shots]["average"], abs=0.0101)


# ---- beside a run ----


@pytest.mark.parametrize("size", published.SIZES)
@pytest.mark.parametrize("variant", PAPER)
def test_a_run_of_the_papers_text_has_its_row_and_no_remark(variant, size):
    beside = find(f"{published.CONFIG_NAMES[variant]}_{size}").beside
    for shots in (0, 1, ""):
        assert beside("run", shots) == (published.read_results()[variant, size][str(shots)], "")


def test_a_run_of_the_authors_code_has_a_remark():
    _, remark = find("authors_ddl_dv4_small").beside("run", "")
    assert remark.startswith(
        "Settings of run that differ from the paper's (config/ddl_dv4_small.py): ddl_v_sigmoid"
    )


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--learning_rate=2e-3"], "learning_rate=0.002 (paper: 0.001)"),
        (["--optimizer=muon"], "optimizer=muon (paper: adamw)"),
        (["--max_steps=50000"], "max_steps=50000 (paper: 100000)"),
        (["--dataset=other"], "dataset=other (paper: fineweb_edu)"),
        (["--mup=False"], "mup=False (paper: True)"),
        (["--num_attention_heads=12"], "num_attention_heads=12 (paper: 6)"),
        (["--ddl_update=write_only"], "ddl_update=write_only (paper: delta)"),
        (["--state_dtype=bfloat16"], "state_dtype=bfloat16 (paper: float32)"),
        (["--block_size=512"], "block_size=512 (paper: 1024)"),
    ],
)
def test_a_setting_that_differs_is_named_under_the_row(options, difference):
    row, remark = find("ddl_dv4_small", *options).beside("run", "")
    assert row["val_loss"] == 2.83545
    assert remark == (
        f"Settings of run that differ from the paper's (config/ddl_dv4_small.py): {difference}."
    )


@pytest.mark.parametrize(
    "option",
    [
        "--seed=7",
        "--micro_batch_size=4",
        "--compile=False",
        "--engine=fsdp",
        "--dataset=/data/fineweb_edu",
        "--out_dir=runs/other",
    ],
)
def test_a_setting_that_the_paper_leaves_open_is_not_named(option):
    assert find("gpt_small", option).beside("run", "")[1] == ""


def test_an_unfinished_run_is_named():
    remark = find("gpt_small", step=50_000).beside("run", 0)[1]
    assert remark.endswith(": trained for 50,000 of max_steps=100000.")


def test_several_settings_are_named_in_one_line():
    remark = find("ddl_july_small", "--warmup_steps=10").beside("run", 0)[1]
    for difference in ("warmup_steps=10 (paper: 2000)", "ddl_v_input=context (paper: residual)"):
        assert difference in remark


def test_a_model_that_the_paper_does_not_have_has_no_row():
    other_size = find("ddl_dv4_small", "--num_hidden_layers=6")
    assert other_size.beside("run", 0) == (
        {},
        "The paper reports no results for run (DDL-gpt-mha-rope with 6 layers and hidden_size=768).",
    )
    assert find("mhc_small").beside("run", 0)[0] == {}


def test_numbers_of_shots_that_the_paper_does_not_have():
    assert find("gpt_small").beside("run", 5) == (
        {},
        "The paper reports no 5-shot results for run.",
    )


def test_a_folder_that_does_not_say_how_it_was_trained():
    run, model = configure(["config/ddl_dv4_small.py", "--ddl_v_input=context"])
    row, remark = published.find(run.model, model).beside("exported", 0)
    assert row == published.read_results()[run.model, "small"]["0"]
    assert remark == (
        "Settings of exported that differ from the paper's (config/ddl_dv4_small.py): "
        "ddl_v_input=context (paper: residual), it is not known how it was trained."
    )


def test_another_validation_corpus_is_named():
    beside_validation = find("gpt_small").beside_validation
    assert beside_validation("run", {"settings": {"corpus": CORPUS}})[1] == ""
    other_corpus = {"settings": {"corpus": {**CORPUS, "sha256": "2"}}}
    assert "validated on a corpus other than" in beside_validation("run", other_corpus)[1]


def test_another_validation_corpus_of_an_exported_folder_is_named():
    run, model = configure(["config/gpt_small.py"])
    record = {"settings": {"corpus": CORPUS}, "dataset": "openwebtext"}
    row, remark = published.find(run.model, model).beside_validation("exported", record)
    assert row["val_loss"] == 2.85426
    assert "validated on openwebtext (paper: fineweb_edu)" in remark


# ---- in the tables of eval.py ----


def test_the_row_stands_below_the_models_own():
    record = {
        "weights": "digest",
        "label": "a",
        "n-shot": {},
        "shots": 1,
        "settings": {"dtype": "float32", "limit": None, "add_bos_token": False},
        "shown": {"piqa": ("acc_norm", 66.0, 1.0)},
    }
    papers = {"digest": find("gpt_small", "--beta1=0.95")}

    def show(record: dict) -> str:
        text = comparison.format_markdown(comparison.make_tables([record], papers))
        return " ".join(text.split())

    text = show(record)
    assert "| 66.00 ± 1.00 | 65.94 |" in text
    assert text.endswith("beta1=0.95 (paper: 0.9).")
    # the paper has no such task, so nothing is said of it
    assert "paper" not in show({**record, "shown": {"lambada": ("acc", 1.0, 0.5)}})
    validation = {
        "weights": "digest",
        "label": "a",
        "shots": None,
        "dataset": "fineweb_edu",
        "record": {"val_loss": 2.9, "val_perplexity": 18.2},
        "settings": {"corpus": CORPUS, "dtype": "float32"},
    }
    text = show(validation)
    assert "| 2.9000 | 2.8543 |" in text
    assert "| 18.2000 | 17.3616 |" in text
