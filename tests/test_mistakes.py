"""What train.py refuses: one line on stderr, exit code 2, and nothing written."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import configure, encode_shard, one_line_error, small_run
from in_process import call
from training_runs import change_saved_state

from training import checkpoint


def training_error(*arguments) -> str:
    """Run train.py in this process and return the one line of its error."""
    return one_line_error(call("train.py", *arguments))


@pytest.fixture(scope="module")
def finished_run(corpus, tmp_path_factory) -> Path:
    """Train a run of six steps."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert call("train.py", *small_run(corpus, folder)).returncode == 0
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
    ({"max_stepz": 5}, "unknown key --max_stepz, did you mean max_steps, "),
    ({"learning_ratee": 1e-3}, "unknown key --learning_ratee, did you mean learning_rate"),
    ({"d_v": 4}, "unknown key --d_v: the key is ddl_value_channels"),
    ({"beta_init": 1}, "unknown key --beta_init: the key is ddl_beta_init"),
    ({"n_layer": 3}, "unknown key --n_layer: the key is num_hidden_layers"),
    (
        {"config": "config/demo_cpu.py"},
        "--config=config/demo_cpu.py: give the file without --config=",
    ),
    ({"model": "ddl-gpt-mha-rope"}, "is not a model variant, did you mean DDL-gpt-mha-rope?"),
    ({"max_steps": "many"}, "--max_steps=many: give a whole number"),
    ({"max_steps": 0}, "max_steps=0: give 1 or more"),
    ({"learning_rate": "fast"}, "--learning_rate=fast: give a number"),
    ({"wandb_log": True}, "unknown key --wandb_log: give --tracker=wandb"),
    ({"muon_learning_rate": -1}, "muon_learning_rate=-1.0: give 0 or more"),
    ({"ema_half_life": 0}, "ema_half_life=0: give 1 or more"),
    ({"init_from_weights": "ema"}, "init_from_weights=ema has no effect with init_from=None"),
    (
        {"init_from": "RUN", "init_from_weights": "ema"},
        "init_from=RUN: RUN/checkpoints/step_00000006 has no averaged weights (ema.safetensors)",
    ),
    # keys that do not fit each other or the model
    ({"model": "gpt-mha-rope", "ddl_beta_init": 1.0}, "--ddl_beta_init is not a key of gpt-mha"),
    ({"ddl_beta_init": 3}, "ddl_beta_init=3.0: give a number from 0 to 2"),
    ({"min_lr": 1.0}, "min_lr=1.0: give a number from 0 to learning_rate"),
    (
        {"schedule": "wsd", "min_lr": 0.001, "decay_steps": 5},
        "decay_steps=5, but max_steps=6 has 4 steps after warmup_steps=2: give 0 to 4, or None",
    ),
    (
        {"schedule": "wsd", "min_lr": 0.001, "decay_steps": 1, "warmup_steps": 9},
        "has 0 steps after warmup_steps=9",
    ),
    (
        {"weight_decay_rate": 0.1, "learning_rate": 0.0},
        "weight_decay_rate=0.1 with learning_rate=0: ",
    ),
    (
        {"optimizer": "muon", "muon_learning_rate": 0.0, "weight_decay_rate": 0.1},
        "with muon_learning_rate=0: parameters with a learning rate of 0 do not decay",
    ),
    ({"engine": "ddp", "shard_size": 1}, "shard_size=1 has no effect with engine=ddp"),
    ({"dtype": "float8"}, "dtype='float8': give 'auto' or 'float32' or 'bfloat16' or 'float16'"),
    (
        {"cuda_graphs": True},
        "cuda_graphs=on: CUDA graphs need a CUDA device and compile=True; give --cuda_graphs=auto",
    ),
    (
        {"wandb_project": "mine"},
        "wandb_project=mine has no effect with tracker=None; omit wandb_project",
    ),
    (
        {"tracker": "tensorboard", "wandb_run_name": "mine"},
        "wandb_run_name=mine has no effect with tracker=tensorboard; omit wandb_run_name",
    ),
    ({"tracker": "mlflow"}, "tracker='mlflow': give 'wandb' or 'trackio' or 'tensorboard' or None"),
    # the corpus
    ({"dataset": "nowhere"}, "nowhere does not hold *train_*.bin"),
    ({"dataset": "fineweb_edu"}, "run `python data/fineweb_edu/prepare.py`"),
    ({"vocab_size": 256}, "has 257 tokens; give --vocab_size=257"),
    ({"vocab_size": 64, "resume": "auto"}, "has 257 tokens; give --vocab_size=257"),
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
    ({"resume": "TMP/missing"}, "TMP/missing does not exist"),
    (
        {"init_from": "TMP/missing"},
        "init_from=TMP/missing: TMP/missing does not exist; give a run folder made by train.py, one "
        "of its checkpoints/step_*, or a folder of exported or released weights",
    ),
    (
        {"out_dir": "RUN", "resume": "RUN/checkpoints/step_00000003"},
        "has another latest checkpoint, step_00000006",
    ),
    (
        # evaluation may change
        {
            "out_dir": "RUN",
            "resume": "auto",
            "max_steps": 9,
            "learning_rate": 0.02,
            "seed": 7,
            "hidden_size": 24,
            "eval_batches": 1,
        },
        "was trained with hidden_size=12 (not 24), learning_rate=0.01 (not 0.02), seed=0 (not 7); "
        "to resume it, omit",
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
        64,
        {"global_batch_size": 480, "max_steps": 100_000},
        "(64); try --global_batch_size=448 (-6.7% tokens per step; the same tokens in 107,143 "
        "steps, --max_steps=107143) or --global_batch_size=512 (+6.7% tokens per step; the "
        "same tokens in 93,750 steps, --max_steps=93750)",
    ),
    (8, {"global_batch_size": 6}, "(8); try --global_batch_size=8 (+33.3% tokens"),
    (2, {"global_batch_size": 24, "micro_batch_size": 5}, "try --micro_batch_size=4"),
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


def test_the_fix_for_a_key_of_a_config_file_is_another_value(tmp_path):
    config_file = tmp_path / "mine.py"
    config_file.write_text("model = 'gpt-mha-rope'\nlearning_rate = 0.0\nweight_decay_rate = 0.1\n")
    with pytest.raises(ValueError, match=r"give .*--weight_decay_rate=None"):
        configure([str(config_file)])
    configure([str(config_file), "--weight_decay_rate=None"])


# ---- arguments without an effect ----

# (argument, the argument that gives it an effect, the setting with which it has none)
IDLE = [
    ("--ddl_v_constant_value=1.5", "--ddl_v_constant=True", "ddl_v_constant=False"),
    ("--ddl_beta_hidden_size=7", "--ddl_beta_single_linear=False", "ddl_beta_single_linear=True"),
    ("--ddl_v_sigmoid_scale=2.0", "--ddl_v_sigmoid=True", "ddl_v_sigmoid=False"),
    ("--ddl_v_sigmoid=False", "--ddl_v_constant=False", "ddl_v_constant=True"),
    # it counts with ddl_v_sigmoid, which counts with ddl_v_constant
    ("--ddl_v_sigmoid_scale=2.0", "--ddl_v_constant=False", "ddl_v_constant=True"),
    ("--ddl_k_hidden_size=7", "--ddl_map=v", "ddl_map=k"),
    ("--hidden_size_base=64", "--mup=True", "mup=False"),
    ("--decay_steps=3", "--schedule=wsd", "schedule=cosine"),
    ("--muon_learning_rate=0.01", "--optimizer=muon", "optimizer=adamw"),
    ("--rope_base=500.0", "--rope_ratio=0.5", "rope_ratio=0.0"),
]


SHORT_RUN = ["--model=DDL-gpt-mha-rope", "--max_steps=9", "--warmup_steps=0"]


@pytest.mark.parametrize(("argument", "enabling_argument", "disabled"), IDLE)
def test_an_argument_without_an_effect_is_refused(argument, enabling_argument, disabled, tmp_path):
    message = f"{argument[2:]} has no effect with {disabled}(, ddl_update=delta)?; omit "
    with pytest.raises(ValueError, match=message):
        configure([*SHORT_RUN, f"--{disabled}", argument])
    key, _, value = argument[2:].partition("=")
    run_config, model_config = configure([*SHORT_RUN, argument, enabling_argument])
    assert str({**vars(run_config), **vars(model_config)}[key]) == value
    # a config file may hold the key, because one file may serve several variants
    (tmp_path / "file.py").write_text(f"{key} = {value}\n")
    configure([str(tmp_path / "file.py"), *SHORT_RUN, f"--{disabled}"])


# ---- corpora and runs ----


DAMAGED = [
    ("small_train_000001.bin", lambda old: old[:-2], "small_train_000001.bin is damaged"),
    (
        "meta.json",
        lambda old: old.replace(b"257", b"259"),
        "vocab_size is 259 in meta.json, but its tokenizer has 257 tokens",
    ),
    (
        "tokenizer.json",
        lambda old: b'{"name": "gpt2"}',
        "vocab_size is 257 in meta.json, but its tokenizer has 50257 tokens",
    ),
]


@pytest.mark.parametrize(("file", "change", "message"), DAMAGED)
def test_damaged_corpora_are_refused(corpus, tmp_path, file, change, message):
    damaged = shutil.copytree(corpus, tmp_path / "corpus")
    (damaged / file).write_bytes(change((damaged / file).read_bytes()))
    assert message in training_error(*small_run(damaged, tmp_path / "out"))
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


MUON_RATES = {
    "muon_learning_rate": 2e-3,
    "embedding_learning_rate": 0.05,
    "weight_decay_rate": 0.03,
}

# (a change to state.json of the finished run, arguments, the line)
CHANGED_RUNS = [
    (
        lambda state: state["run_config"].pop("beta2"),
        "--beta2=0.99",
        "beta2=0.95 (not 0.99",  # a key that is newer than the run counts as its default
    ),
    (
        lambda state: state["run_config"].update(new_key=3),
        "--max_steps=9",
        "was trained by another version of this code, with keys that this one does not have: "
        "new_key=3",
    ),
    (
        # a run of the time when Weights & Biases was the only tracker
        lambda state: state["run_config"].update(wandb_log=False),
        "--learning_rate=0.5",
        "was trained with learning_rate=0.01 (not 0.5); to resume it",
    ),
    (
        lambda state: state["run_config"].update(dataset="/nowhere"),
        "--max_steps=7",
        "dataset=/nowhere: /nowhere does not hold",
    ),
    *(
        (
            lambda state: state["run_config"].update(optimizer="muon", **MUON_RATES),
            f"--{key}=0.04",
            f"{key}={rate} (not 0.04",
        )
        for key, rate in MUON_RATES.items()
    ),
    pytest.param(
        lambda state: state["trained_on"].update(device="cuda"),
        "--device=auto",
        "was trained on a GPU, but torch finds none",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
    ),
]


@pytest.mark.parametrize(("change", "argument", "line"), CHANGED_RUNS)
def test_a_run_that_cannot_be_resumed_as_it_is_is_refused(branch, change, argument, line):
    change_saved_state(branch, change)
    assert line in training_error(f"--out_dir={branch}", "--resume=auto", argument)


def test_a_checkpoint_outside_of_a_run_needs_an_out_dir(finished_run, tmp_path):
    copy = shutil.copytree(checkpoint.find(finished_run), tmp_path / "step_00000006")
    line = training_error(f"--resume={copy}")
    assert f"resume={copy} is not one of a run's checkpoints; give the run folder" in line


def test_a_checkpoint_without_optimizer_is_not_resumed(branch):
    latest = checkpoint.find(branch)
    (latest / "optimizer.safetensors").unlink()
    line = training_error(f"--resume={latest}", "--max_steps=9")
    assert "cannot be resumed, because it has no optimizer.safetensors; start a new run" in line
