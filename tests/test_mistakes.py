"""What train.py refuses: one line on stderr, exit code 2, and nothing written."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import encode_shard, small_run
from in_process import call
from training_runs import change_saved_state, run_train, training_error


@pytest.fixture(scope="module")
def finished_run(corpus, tmp_path_factory) -> Path:
    """Train a run of six steps."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    run_train(*small_run(corpus, folder))
    return folder


@pytest.fixture
def untouched_run(finished_run) -> Iterator[Path]:
    """Return the finished run, and assert that the test writes nothing into it."""
    paths = [finished_run, *sorted(finished_run.rglob("*"))]
    times = [path.stat().st_mtime_ns for path in paths]
    yield finished_run
    assert [finished_run, *sorted(finished_run.rglob("*"))] == paths
    assert [path.stat().st_mtime_ns for path in paths] == times


@pytest.fixture
def branch(finished_run, tmp_path) -> Path:
    """Copy the finished run, for a test that changes it."""
    return shutil.copytree(finished_run, tmp_path / "branch")


# ---- arguments ----

# (arguments, the line); CORPUS is the folder of the corpus, RUN that of a run of six steps, TMP an
# empty one
MISTAKES = [
    ({"learning_ratee": 1e-3}, "unknown key --learning_ratee, did you mean learning_rate"),
    ({"model": "ddl-gpt-mha-rope"}, "is not a model variant, did you mean DDL-gpt-mha-rope?"),
    ({"max_steps": 0}, "max_steps=0: give a number at least 1"),
    # keys that do not fit each other or the model
    ({"model": "gpt-mha-rope", "ddl_beta_init": 1.0}, "unknown key --ddl_beta_init"),
    ({"min_lr": 1.0}, "min_lr=1.0: give a number from 0 to learning_rate"),
    (
        {"schedule": "wsd", "min_lr": 0.001, "decay_steps": 5},
        "decay_steps=5: max_steps=6 has only 4 steps after warmup_steps=2",
    ),
    (
        {"optimizer": "muon", "muon_learning_rate": 0.0, "weight_decay_rate": 0.1},
        "with muon_learning_rate=0: parameters with a learning rate of 0 do not decay",
    ),
    (
        {"cuda_graphs": True},
        "cuda_graphs=on: CUDA graphs need a CUDA device and compile=True; give --cuda_graphs=auto",
    ),
    # the corpus
    ({"dataset": "nowhere"}, "nowhere does not hold *train_*.bin"),
    ({"vocab_size": 256}, "has 257 tokens"),
    ({"block_size": 40_000}, "the training split has 32111 tokens"),
    ({"block_size": 2388, "eval_part": "first"}, "eval_part=first: the validation split of"),
    (
        {"global_batch_size": 2008, "micro_batch_size": 4},
        "global_batch_size=2008, but the training split of CORPUS has 2005 sequences of "
        "block_size=16",
    ),
    # the run folder, and what is resumed
    ({"out_dir": "CORPUS/meta.json/run"}, "this is a file, but a folder is needed"),
    ({"out_dir": "RUN"}, "is not empty; resume that run with --resume=auto"),
    (
        {"init_from": "TMP/missing"},
        "init_from=TMP/missing: TMP/missing does not exist; give a run folder made by train.py",
    ),
    (
        # evaluation may change
        {"out_dir": "RUN", "resume": "auto", "hidden_size": 24, "seed": 7, "eval_batches": 1},
        "was trained with hidden_size=12 (not 24), seed=0 (not 7); omit these keys",
    ),
]
# (number of processes, arguments, the line)
MISTAKES_OF_SEVERAL_PROCESSES = [
    (
        4,
        {"global_batch_size": 6},
        "global_batch_size=6 is not divisible by the number of processes (4)",
    ),
    (
        2,
        {"global_batch_size": 24, "micro_batch_size": 5},
        "micro_batch_size=5 does not divide the 12",
    ),
    (
        4,
        {"engine": "fsdp", "shard_size": 3},
        "shard_size=3 does not divide the number of processes",
    ),
]


@pytest.mark.parametrize(
    ("num_processes", "arguments", "line"),
    [*((1, *mistake) for mistake in MISTAKES), *MISTAKES_OF_SEVERAL_PROCESSES],
)
def test_mistakes_end_in_one_line_with_nothing_written(
    corpus, untouched_run, tmp_path, monkeypatch, num_processes, arguments, line
):
    def fill_in(text: str) -> str:
        for name, path in (("CORPUS", corpus), ("RUN", untouched_run), ("TMP", tmp_path)):
            text = text.replace(name, str(path))
        return text

    monkeypatch.setenv("WORLD_SIZE", str(num_processes))
    error = training_error(*map(fill_in, small_run(corpus, tmp_path / "out", **arguments)))
    assert fill_in(line) in error
    assert not list(tmp_path.iterdir())


# ---- corpora and runs ----


def test_a_corpus_with_another_vocabulary_than_its_tokenizer_is_refused(corpus, tmp_path):
    damaged = shutil.copytree(corpus, tmp_path / "corpus")
    meta = (damaged / "meta.json").read_text()
    (damaged / "meta.json").write_text(meta.replace("257", "259"))
    line = training_error(*small_run(damaged, tmp_path / "out"))
    assert "vocab_size is 259 in meta.json, but its tokenizer has 257 tokens" in line
    assert not (tmp_path / "out").exists()


def test_another_corpus_than_that_of_the_resumed_run_is_refused(untouched_run, corpus, tmp_path):
    other = shutil.copytree(corpus, tmp_path / "other")
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps({**meta, "source": "elsewhere"}))
    line = training_error(*small_run(other, untouched_run, resume="auto", max_steps=9))
    assert "is not the corpus that" in line


def test_a_damaged_token_ends_the_run_in_one_line(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "corpus")
    (tmp_path / "corpus" / "small_train_000000.bin").write_bytes(encode_shard([300] * 20_000))
    message = training_error(*small_run(tmp_path / "corpus", tmp_path / "run"))
    assert "small_train_000000.bin holds token id 300 at" in message


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_anew(branch):
    for path in branch.glob("checkpoints/*/model.safetensors"):
        path.write_bytes(b"damaged")
    result = call("train.py", f"--out_dir={branch}", "--resume=auto")
    assert result.returncode == 2
    assert b"has no valid checkpoint; give another --out_dir" in result.stderr


def test_a_run_with_keys_that_were_removed_since_is_not_resumed(branch):
    change_saved_state(branch, lambda state: state["model_config"].update(ddl_erase_gate="own"))
    line = training_error(f"--out_dir={branch}", "--resume=auto", "--max_steps=7")
    assert "saved by a version with other keys (ddl_erase_gate)" in line
