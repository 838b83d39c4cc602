"""Published figures: what results/published.csv holds, and beside which runs they stand."""

import json

import pytest
from helpers import sign
from models import PAPER

import eval as eval_script
from evaluation import comparison, published, subjects, tasks
from model import model_class
from training.config import TrainConfig
from training.optimizer import get_learning_rate
from training.settings import configure

CONFIGS = dict(
    zip(PAPER, ("gpt", "ddl_dv1", "ddl_dv4", "ddl_dv4_ec", "ddl_dv4_cc", "ddl_dv4_cc_ec"))
)
JULY = ("--ddl_v_input=context", "--ddl_v_sigmoid=False")
CORPUS = {
    "tokenizer": "gpt2",
    "vocab_size": 50257,
    "source": "HuggingFaceFW/fineweb-edu",
    "name": "sample-100BT",
}
CORPUS |= {"train": {"tokens": 99_000_000_000}, "val": {"tokens": 100_000_000}}
RESULT = {"val_loss": 2.9, "val_perplexity": 18.2}


def subject_of(folder, config="ddl_dv4_small", *options, state=(), corpus=(), rates=None) -> tuple:
    """(the run folder's subject, stem, model configuration) of a finished run, as training leaves
    it; no weights.

    rates: learning rates in metrics.jsonl, by step; None: those of the run's schedule.
    """
    run, model = configure([f"config/{config}.py", *options])
    saved = {
        "model": run.model,
        "model_config": vars(model),
        "run_config": vars(run),
        "step": run.max_steps,
    }
    saved |= {"seconds": 1.0, "skipped": 0, "corpus": {**CORPUS, **dict(corpus)}, **dict(state)}
    checkpoint = folder / config / f"checkpoints/step_{saved['step']:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(saved))
    sign(checkpoint)
    if rates is None:
        rates = {
            step: get_learning_rate(step - 1, run) for step in (1, 2_000, 50_000, run.max_steps)
        }
    lines = [{"step": step, "loss": 3.0, "lr": lr} for step, lr in rates.items()]
    (folder / config / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return subjects.find(str(folder / config)), run.model, model


def shown(subject, stem, model, **changes) -> str:
    """What `eval.py RUN --val` prints of it."""
    entry = {
        "task": "validation",
        "weights": subject.identity,
        "label": subject.label,
        "record": RESULT,
    }
    entry |= {"tokens": 99_999_999, "settings": {"corpus": subject.state["corpus"]}, **changes}
    papers = {subject.identity: published.find(subject, stem, model)}
    return " ".join(comparison.screen(eval_script.tables_of([entry], papers)).split())


def test_the_file_holds_what_both_texts_print_and_what_july_adds():
    """Compared number by number with the tables of both texts when it was made; here their
    extent.
    """
    found = published.figures()
    both = {key for key, row in found.items() for _, text in row.values() if text == "both"}
    january = {("small", shots, stem) for shots in "01" for stem in PAPER}
    january |= {("medium", shots, stem) for shots in "01" for stem in PAPER[:3]}
    assert both == january | {
        (size, "", stem) for size in ("small", "medium") for stem in PAPER[:3]
    }
    assert found.keys() == {
        (size, shots, stem)
        for size in ("small", "medium")
        for shots in ("", "0", "1")
        for stem in PAPER
    }
    assert sum(map(len, found.values())) == 273
    assert {text for row in found.values() for _, text in row.values()} == {"both", "july"}
    assert found["small", "", "gpt-mha-rope"]["train_ktok_per_s"] == (1509.6, "july")
    assert found["medium", "1", "DDL-gpt-mha-rope-CC-EC"]["sciq"] == (90.5, "july")


def test_every_published_average_is_that_of_its_row():
    for (_, shots, _), row in published.figures().items():
        if shots:
            values = {task: (row[task][0], None) for task in tasks.PAPER_METRICS}
            assert comparison.average(values)["average"][0] == pytest.approx(
                row["average"][0], abs=0.0101
            )


@pytest.mark.parametrize("size", ["small", "medium"])
@pytest.mark.parametrize("stem", PAPER)
def test_a_run_of_the_papers_recipe_has_its_row(tmp_path, stem, size):
    result = shown(*subject_of(tmp_path, f"{CONFIGS[stem]}_{size}"))
    loss, perplexity = (
        published.figures()[size, "", stem][key][0] for key in ("val_loss", "val_ppl")
    )
    assert f"| 2.9000 | {loss:.4f} | {2.9 - loss:+.4f} |" in result
    assert f"| 18.2000 | {perplexity:.4f} | {18.2 - perplexity:+.4f} |" in result
    footnote = f"Published row beside {CONFIGS[stem]}_{size}, step 100,000:"
    if stem != "gpt-mha-rope":
        footnote += " its write value is that of the released code, not of the January text or the July text "
        footnote += "(which one was published is not known);"
    assert result.endswith(
        f"{footnote} its residual state is bfloat16, the released code's float32."
    )


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ([], {"corpus": {"tokenizer": "bpe4096"}}, "tokens of bpe4096, not GPT-2's"),
        ([], {"corpus": {"source": "Salesforce/wikitext"}}, "trained on Salesforce/wikitext, not "
                                                            "on FineWeb-Edu"),
        ([], {"corpus": {"source": None}}, "trained on a corpus that does not name its source, not "
                                           "on FineWeb-Edu"),
        ([], {"corpus": {"train": {"tokens": 10**10}}}, "10,000,000,000 training tokens, seen more "
                                                        "than once"),
        ([], {"state": {"step": 50_000}}, "24,576,000,000 tokens seen, not 49,152,000,000"),
        (["--max_steps=50000", "--global_batch_size=960"], {}, "max_steps=50000, not 100000; "
                                                               "global_"),
        (["--optimizer=muon"], {}, "optimizer='muon', not 'adamw'"),
        (["--learning_rate=2e-3"], {}, "learning_rate=0.002, not 0.001"),
        (["--schedule=wsd"], {}, "schedule='wsd', not 'cosine'"),
        (["--warmup_steps=100"], {}, "warmup_steps=100, not 2000"),
        (["--weight_decay=0.0"], {}, "weight_decay=0.0, not 0.1"),
        (["--beta1=0.95"], {}, "beta1=0.95, not 0.9"),
        (["--beta2=0.99"], {}, "beta2=0.99, not 0.95"),
        (["--grad_clip=0.5"], {}, "grad_clip=0.5, not 1.0"),
        ([], {"state": {"run_config": {"init_from": "other"}}}, "init_from='other', not None"),
        ([], {"rates": {1: 5e-7, 60_000: 1e-3}}, "step 60,000 had the rate 1.00e-03, which is not "
                                                 "the schedule's"),
        (["--block_size=512", "--global_batch_size=960"], {}, "global_batch_size=960, not 480; "
                                                              "block_size=512, not"),
        (["--mup=False"], {}, "mup=False, not True"),
        (["--num_hidden_layers=6"], {}, "6 layers of width 768, no size of the texts"),
        (["--ddl_value_channels=8"], {}, "ddl_value_channels=8, not 4"),
        (["--ddl_update=write_only"], {}, "ddl_update='write_only', not 'delta'"),
        (["--ddl_beta_init=0.5"], {}, "ddl_beta_init=0.5, not 1.0"),
        (["--ddl_state_read_init=0.5"], {}, "ddl_state_read_init=0.5, not None"),
        (["--ddl_v_input=context"], {}, "ddl_v_input='context', not 'residual'"),
        (["--ddl_v_sigmoid_scale=2.0"], {}, "ddl_v_sigmoid_scale=2.0, not 4.0"),
    ],
)  # fmt: skip
def test_what_does_not_agree_leaves_the_row_out_with_the_reason(tmp_path, options, changes, reason):
    result = shown(*subject_of(tmp_path, "ddl_dv4_small", *options, **changes))
    assert "| published" not in result
    assert "No published row beside ddl_dv4_small, step " in result
    assert f" {reason}" in result


@pytest.mark.parametrize(
    ("options", "changes", "footnote"),
    [
        (["--seed=7"], {}, ""),
        (["--min_lr=0"], {}, "; min_lr=0.0, the texts do not say theirs."),
        (["--min_lr=5e-5"], {}, ""),
        (["--dtype=float32"], {}, "; dtype=float32, the texts do not say theirs."),
        (["--vocab_size=50257"], {}, "; vocab_size=50257, not 50304; "),
        (["--init=normal"], {}, "; init='normal', not 'spectral'; "),
        ([], {"state": {"skipped": 2}}, "; 2 steps skipped."),
        (
            [],
            {"rates": {}},
            "; no metrics.jsonl beside it to show that its rates were those of one schedule.",
        ),
        (
            [],
            {"corpus": {"name": "sample-350BT"}},
            "; trained on HuggingFaceFW/fineweb-edu sample-350BT; ",
        ),
        (
            [],
            {"corpus": {"source": "x/FineWeb_Edu-GPT2", "name": None}},
            "; trained on x/FineWeb_Edu-GPT2; ",
        ),
        (
            (
                "--micro_batch_size=4 --kernels=off --compile=False --engine=fsdp --eval_batches=2"
            ).split(),
            {},
            "",
        ),
        (["--ddl_state_shortconv_kernel_size=4", "--ddl_state_read_init=0.25"], {}, ""),
    ],
)
def test_small_deviations_are_named_under_the_row(tmp_path, options, changes, footnote):
    plain = shown(*subject_of(tmp_path / "plain"))
    result = shown(*subject_of(tmp_path, "ddl_dv4_small", *options, **changes))
    assert "| published | difference |" in result
    assert footnote in result
    assert (result == plain) == (footnote == "")


def test_a_state_as_the_authors_keep_it_is_no_deviation(tmp_path):
    said = "its residual state is bfloat16, the released code's float32"
    ours, theirs = (
        shown(*subject_of(tmp_path / name, "ddl_dv4_small", f"--state_dtype={name}"))
        for name in ("bfloat16", "float32")
    )
    assert said in ours
    assert "| published | difference |" in theirs
    assert said not in theirs


def test_validation_is_of_the_runs_own_corpus(tmp_path):
    found = subject_of(tmp_path)
    assert "; 9,999 validation tokens, the texts' 100,000,000." in shown(*found, tokens=9_999)
    other = shown(*found, settings={"corpus": {**CORPUS, "sha256": "0"}})
    assert other.endswith(
        "No published row beside ddl_dv4_small, step 100,000: validated on another corpus than its "
        "own."
    )


def found_in(tmp_path, config, *options) -> dict[int | str, dict]:
    """The figures beside a run, by shots."""
    found = published.find(*subject_of(tmp_path, config, *options))
    return {shots: found.beside("x", shots)[0] for shots in (0, 1, 2, "")}


def test_julys_own_settings_find_its_rows(tmp_path):
    for stem, config in list(CONFIGS.items())[1:]:
        rows = found_in(tmp_path, f"{config}_medium", *JULY)
        assert rows[1]["sciq"] == published.figures()["medium", "1", stem]["sciq"][0]
        assert {shots for shots, row in rows.items() if row} == {0, 1, ""}
    found = published.find(*subject_of(tmp_path, "ddl_dv4_cc_ec_small", *JULY))
    assert (
        "its write value is that of the July text, not of the released code or the January text"
        in found.notes[0]
    )


def test_januarys_write_values_find_the_rows_that_it_has(tmp_path):
    sigmoid, linear = "--ddl_v_sigmoid_scale=1.0", "--ddl_v_sigmoid=False"
    assert found_in(tmp_path, "ddl_dv1_small", sigmoid)[0]["sciq"] == 72.5
    assert found_in(tmp_path, "ddl_dv4_medium", linear)[""] == {
        "val_loss": 2.59267,
        "val_ppl": 13.3654,
    }
    assert found_in(tmp_path, "ddl_dv4_cc_small", linear)[1]["sciq"] == 79.5
    medium = published.find(*subject_of(tmp_path, "ddl_dv4_cc_medium", linear))
    assert medium.beside("x", 1) == (
        {},
        "No published row beside x: no such figures in the January text.",
    )


def test_muP_at_its_base_width_changes_nothing(tmp_path):  # noqa: N802
    assert found_in(tmp_path, "gpt_medium", "--mup=False")[""]["val_ppl"] == 13.5356


def test_tasks_stand_beside_the_same_number_of_examples(tmp_path):
    subject, stem, model = subject_of(tmp_path, "gpt_small")
    papers = {subject.identity: published.find(subject, stem, model)}
    entry = {"task": "piqa", "weights": subject.identity, "label": "a", "n-shot": {}, "shots": 1}
    entry |= {"settings": {"dtype": "float32", "limit": None, "add_bos_token": False}}
    entry |= {"shown": {"piqa": ("acc_norm", 66.0, 1.0)}}
    text = " ".join(comparison.screen(eval_script.tables_of([entry], papers)).split())
    assert "| 66.00 ± 1.00 | 65.94 | +0.06 ± 1.00 |" in text
    for changed, reason in (
        ({"shots": 5}, "no such figures in the texts"),
        ({"settings": {**entry["settings"], "limit": 9}}, "only the first 9 items"),
        (
            {"settings": {**entry["settings"], "add_bos_token": True}},
            "texts begin with end-of-text",
        ),
    ):
        text = comparison.screen(eval_script.tables_of([entry | changed], papers))
        assert text.endswith(f"No published row beside a: {reason}.")
        assert "published |" not in text
    other = entry | {"task": "lambada", "shown": {"lambada": ("acc", 1.0, 0.5)}}
    assert "ublished" not in comparison.screen(
        eval_script.tables_of([other | {"shots": 5}], papers)
    )


def test_a_folder_that_does_not_say_how_it_was_trained_has_no_row(tmp_path):
    _, stem, model = subject_of(tmp_path, "gpt_small")
    exported = subjects.Subject("exported", tmp_path, None, "")
    found = published.find(exported, stem, model)
    line = "No published row beside exported: the folder does not say how it was trained."
    assert found.beside("exported", 0) == ({}, line)
    assert found.beside_validation(
        "exported", {"tokens": 10**8, "settings": {"corpus": CORPUS}}
    ) == ({}, line)


def test_a_stream_that_no_text_has():
    config = model_class("gpt-mha-rope").Config(hidden_size=768)
    assert published.compare_model("my-stream", config)[2] == ["no text has my-stream"]


def test_the_recipe_is_that_of_the_texts():
    """Sections 5.1 (January) and 4.1 (July)."""
    texts = {
        "max_steps": 100_000,
        "global_batch_size": 480,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "beta1": 0.9,
    }
    texts |= {
        "schedule": "cosine",
        "warmup_steps": 2000,
        "weight_decay": 0.1,
        "beta2": 0.95,
        "grad_clip": 1.0,
    }
    assert {key: getattr(TrainConfig(), key) for key in texts} == texts
