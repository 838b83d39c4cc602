"""Test that runs and shards of an earlier version of this code stay the same: `pytest -m golden`.

`tests/golden/` holds, for every model, the checkpoint of a tiny run at step 6 and, in golden.json,
the settings, losses and gradient norms of its ten steps with a digest of its last checkpoint. It
also holds the SHA-256 of the shards that the script of each corpus writes for the texts below, and of
the sequences of each synthetic task. On
the machine and torch that wrote them a run must end with the same bits. On other machines, which sum
products in another order, its losses must be close.

    PYTHONPATH=. python tests/test_golden.py NAME ...   regenerates what a change is meant to change
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import write_checksums
from in_process import call, train_in_processes

from data.loader import open_train_batches, open_validation_batches
from data.shards import open_corpus, read_optional_json
from model import MODEL_NAMES, model_class
from training import checkpoint, metrics
from utils.files import write_json

ROOT = Path(__file__).parents[1]

GOLDEN = ROOT / "tests" / "golden"
RECORD = GOLDEN / "golden.json"
NUM_STEPS = 10
RESUMED_STEP = 6
# Relative tolerances of losses on another machine. Muon's Newton-Schulz steps amplify rounding at
# once; AdamW does so after some steps, because it divides by moments that are small at first. The
# largest difference of AdamW that was seen is 3.4e-4 (July, step 4).
FIRST_TOLERANCE = {"adamw": 1e-3, "muon": 1e-2}
LATER_TOLERANCE = 1e-2
NUM_FIRST_STEPS = 4

RUN = {
    "seed": 3,
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "kernels": "off",
    "engine": "ddp",
    "max_steps": NUM_STEPS,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "optimizer": "adamw",
    "grad_clip": 1.0,
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "schedule": "cosine",
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "eval_interval": 5,
    "eval_batches": 2,
    "eval_full": True,
    "eval_part": "all",
    "checkpoint_interval": 3,
    "keep_last": 9,
}
SIZE = {
    "vocab_size": 257,
    "block_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "head_dim": 4,
}
# Keys of a model that have no effect beside the settings of these runs. A run in which one of them
# has an effect sets it.
IDLE = {
    "hidden_size_base",
    "ddl_beta_hidden_size",
    "ddl_k_branch",
    "ddl_k_input",
    "ddl_k_hidden_size",
    "ddl_v_constant_value",
}
ADDITIVE = "gpt-mha-rope"
CC = "DDL-gpt-mha-rope-CC"
CC_EC = "DDL-gpt-mha-rope-CC-EC"
V_MAP = {
    "ddl_map": "v",
    "ddl_k_branch": "mlp",
    "ddl_k_input": "read",
    "ddl_k_hidden_size": 5,
    "ddl_beta_single_linear": False,
    "ddl_beta_hidden_size": 3,
}
JULY = {"ddl_v_input": "context", "ddl_v_sigmoid": False}
MUP = {"mup": True, "hidden_size_base": 32, "schedule": "wsd", "decay_steps": 4}
MAIN_GAIN = {"lambda_input": False, "lambda_values": "none", "lambda_gain": True}
NORM_PLACEMENT = {"model": "NormPlacement-gpt-mha-rope"}
# name: (number of processes, keys); all other keys of the model have their defaults of that time
RUNS = {
    **{model_name: (1, {"model": model_name}) for model_name in MODEL_NAMES},
    "gpt-mha-rope_muon": (1, {"model": ADDITIVE, "optimizer": "muon"}),
    "DDL-gpt-mha-rope-CC_muon": (1, {"model": CC, "optimizer": "muon"}),
    "v-Map": (1, {"model": "DDL-gpt-mha-rope", **V_MAP}),
    "July": (1, {"model": CC, **JULY}),
    "muP": (1, {"model": CC_EC, **MUP}),
    "erase_only": (1, {"model": "DDL-gpt-mha-rope", "ddl_update": "erase_only"}),
    "main_gain": (1, {"model": "Lambdas-gpt-mha-rope", **MAIN_GAIN}),
    "MGT_full_post": (1, {"model": "MGT-gpt-mha", "mgt_arm": "full_post"}),
    "MGT_mhc_pre": (1, {"model": "MGT-gpt-mha", "mgt_arm": "mhc_pre"}),
    "MGT_ddl_post": (1, {"model": "MGT-gpt-mha", "mgt_arm": "ddl_post"}),
    "MGT_branch_mult": (
        1,
        {"model": "MGT-gpt-mha", "mgt_arm": "additive", "residual_branch_mult": 0.38},
    ),
    **{
        f"norm_placement_{placement}": (1, {**NORM_PLACEMENT, "norm_placement": placement})
        for placement in ("lns", "keel", "post", "deepnorm")
    },
    "ZAYA": (1, {"model": "LAuReL-gpt-mha-rope", "laurel_form": "zaya"}),
    "gpt-mha-rope_ddp": (2, {"model": ADDITIVE, "engine": "ddp"}),
    "DDL-gpt-mha-rope-CC-EC_ddp": (2, {"model": CC_EC, "engine": "ddp"}),
    "gpt-mha-rope_fsdp": (2, {"model": ADDITIVE, "engine": "fsdp"}),
    "DDL-gpt-mha-rope-CC-EC_fsdp": (2, {"model": CC_EC, "engine": "fsdp"}),
}

DOCUMENTS = [
    "One document.\n",
    "Ümlaute and 日本語: 👩‍👧\n\n",
    "def f(x):\n    return x + 1\n",
    "<|endoftext|> in a text ",
    " ".join(str(i * i) for i in range(60)),
    "the cat sat on the mat, the dog on the log. " * 9,
]
WIKI = [
    "",
    " = Robert <unk> = \n",
    "",
    " Robert is an actor . \n",
    " = = Career = = \n",
    "",
    " = Größe = \n",
    " x \n",
]
LIMITS = ["--shard_tokens=150", "--val_tokens=60", "--workers=2"]
# name: the preparation script and its arguments; the sources are what `write_sources` writes
CORPORA = {
    "text": ["text", "--source", "files", "--tokenizer=bpe", "--vocab_size=300", *LIMITS],
    "fineweb_edu": ["fineweb_edu", "--source", "rows.parquet", *LIMITS],
    "openwebtext": ["openwebtext", "--source", "rows.jsonl", *LIMITS],
    "wikitext": (
        "wikitext --repository=wikitext --version=2 --tokenizer=bytes --shard_tokens=100 --workers=2"
    ).split(),
    "python_stdlib": ["python_stdlib", "--tokenizer=bytes", "--workers=2"],
    "copy_task": ["copy_task", "--half=5", "--symbols=7"],
    "recall": ["recall", "--pairs=3", "--positions=16", "--symbols=10"],
    "registers": ["registers", "--registers=3", "--operations=4"],
}


@contextlib.contextmanager
def reproducible_order():
    """Run in the repository's root with one thread, on which the order of sums depends."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.chdir(ROOT):
            yield
    finally:
        torch.set_num_threads(threads)


def complete_settings(keys: dict) -> dict:
    """Return all settings on which the bits of a run depend, so that no later default changes them."""
    idle_keys = IDLE if keys.get("ddl_v_sigmoid", True) else IDLE | {"ddl_v_sigmoid_scale"}
    defaults = vars(model_class(keys["model"]).Config(**SIZE))
    model_settings = {key: value for key, value in defaults.items() if key not in idle_keys}
    return {**model_settings, **RUN, **keys}


def train(num_processes: int, settings: dict, out: Path) -> None:
    """Run train.py with these settings; resume from the checkpoint in `out` if there is one."""
    settings = {
        **settings,
        "dataset": "tests/golden/corpus",
        "out_dir": out,
    }
    arguments = ["--resume=auto", *(f"--{key}={value}" for key, value in settings.items())]
    if num_processes > 1:
        train_in_processes(num_processes, arguments, out.parent / "log")
    else:
        result = call("train.py", *arguments)
        assert result.returncode == 0, result.stderr.decode()


def read_steps(out: Path) -> list[dict]:
    """Return loss and gradient norm of every step, and the validation loss of evaluated steps."""
    steps = {}
    for record in metrics.read(out / "metrics.jsonl"):
        values = {key: record[key] for key in ("loss", "grad_norm", "val_loss") if key in record}
        steps.setdefault(record["step"], {"step": record["step"]}).update(values)
    return list(steps.values())


def compute_digest(out: Path) -> str:
    """Return the SHA-256 over names and bytes of the last weights and optimizer state of a run."""
    digest = hashlib.sha256()
    folder = checkpoint.find(out)
    for kind in ("model", "optimizer"):
        for name, tensor in sorted(checkpoint.load_tensors(folder / f"{kind}.safetensors").items()):
            digest.update(f"{kind} {name} ".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def describe_machine() -> dict:
    """Return what decides the last bits: the processor, its vector instructions, and torch.

    The name of the processor alone does not tell its kinds apart.
    """
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    processor = dict(
        re.findall(r"^(model name|cpu family|model|stepping)\s*: (.*)$", text, re.MULTILINE)
    )
    return {
        **processor,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def copy_checkpoint(name: str, first_step: int, out: Path) -> None:
    """Put the golden checkpoint of a run into a run folder, from which training resumes."""
    target = out / "checkpoints" / f"step_{first_step:08d}"
    shutil.copytree(GOLDEN / "checkpoints" / name, target)


def check_run(name: str, out: Path, first_step: int) -> None:
    """Train a run from a step on, and compare it with the golden record."""
    golden = read_optional_json(RECORD)["runs"][name]
    if first_step:
        copy_checkpoint(name, first_step, out)
    with reproducible_order():
        train(RUNS[name][0], golden["settings"], out)
    steps = read_steps(out)
    expected_steps = [step for step in golden["steps"] if step["step"] > first_step]
    assert [step["step"] for step in steps] == [step["step"] for step in expected_steps]
    bits = find_bits(golden, first_step)
    if bits:
        assert steps == [step for step in bits["steps"] if step["step"] > first_step]
        assert compute_digest(out) == bits["digest"]
    for step, expected in zip(steps, expected_steps):
        tolerance = LATER_TOLERANCE
        if step["step"] - first_step <= NUM_FIRST_STEPS:
            tolerance = FIRST_TOLERANCE[golden["settings"]["optimizer"]]
        for key in expected.keys() - {"grad_norm"}:
            assert step[key] == pytest.approx(expected[key], rel=tolerance), (
                f"{key} of step {step['step']}"
            )


def find_bits(golden: dict, first_step: int) -> dict | None:
    """Return steps and digest of the run on a machine like this one, None if nobody wrote them."""
    machine = describe_machine()
    if golden["made"] == machine:
        return golden
    for other in golden.get("others", []):
        if other["made"] == machine:
            return other["begun"][str(first_step)]
    return None


def write_sources(folder: Path) -> None:
    """Write the texts as every kind of file that corpora are prepared from."""
    (folder / "files").mkdir()
    for index, text in enumerate(DOCUMENTS):
        (folder / "files" / f"{index}.txt").write_text(text, encoding="utf-8")
    pq.write_table(pa.table({"text": DOCUMENTS}), folder / "rows.parquet", row_group_size=2)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    )
    (folder / "wikitext").mkdir()
    splits = ("train", "validation", "test")
    files = "\n".join(f"  - {{split: {split}, path: {split}.parquet}}" for split in splits)
    readme = f"---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n{files}\n---\n"
    (folder / "wikitext" / "README.md").write_text(readme)
    for index, split in enumerate(splits):
        table = pa.table({"text": WIKI[index:] * 3})
        pq.write_table(table, folder / "wikitext" / f"{split}.parquet")
    for library in ("stdlib", "packages"):
        for index in range(6):
            path = folder / library / f"p{index}" / "module.py"
            path.parent.mkdir(parents=True)
            lines = [f"# {library} {index}", *(f"x{i} = {i * index}" for i in range(9 + index))]
            path.write_text("\n".join(lines) + "\n")


def prepare_and_hash(name: str, folder: Path) -> dict[str, str]:
    """Prepare a corpus, and return the SHA-256 of each of its shards by file name.

    A synthetic task has none: return that of ids and targets of each split.
    """
    corpus, *arguments = CORPORA[name]
    libraries = {"stdlib": str(folder / "stdlib"), "purelib": str(folder / "packages")}
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sysconfig.get_path", libraries.__getitem__)
        result = call(f"data/{corpus}/prepare.py", f"--out=made/{name}", *arguments)
        assert result.returncode == 0, result.stderr.decode()
    opened = open_corpus(str(folder / "made" / name))
    if opened.is_task:
        seq_len = opened.meta["block_size"]
        batches = {
            "train": open_train_batches(opened, seq_len, 300, seed=1).get(1, 0, 300),
            "val": open_validation_batches(opened, seq_len).get(list(range(300)), 300),
        }
        return {
            split: hashlib.sha256(torch.cat(batch).numpy().astype("<i8").tobytes()).hexdigest()
            for split, batch in batches.items()
        }
    files = sorted((folder / "made" / name).glob("*.bin"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def source_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    write_sources(folder)
    return folder


@pytest.mark.golden
@pytest.mark.parametrize("first_step", [0, RESUMED_STEP])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_starts_and_resumes_as_before(name, first_step, tmp_path):
    check_run(name, tmp_path / "run", first_step)


@pytest.mark.golden
@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_has_the_same_shards(name, source_files):
    assert prepare_and_hash(name, source_files) == read_optional_json(RECORD)["corpora"][name]


def write_corpus() -> None:
    """Prepare the corpus on which the golden runs are trained."""
    shutil.rmtree(GOLDEN / "corpus", ignore_errors=True)
    result = call(
        "data/text/prepare.py",
        "--source=tests/corpus.txt",
        "--out=tests/golden/corpus",
        "--tokenizer=bytes",
        "--val_tokens=400",
        "--max_tokens=4000",
        "--shard_tokens=2000",
    )
    assert result.returncode == 0, result.stderr.decode()
    (GOLDEN / "corpus" / "preparation.json").unlink()


def write_run(name: str) -> dict:
    """Train a run, keep its checkpoint, and return its record."""
    num_processes, keys = RUNS[name]
    out = Path("runs") / "golden" / name  # relative, because checkpoints store it
    shutil.rmtree(out, ignore_errors=True)
    settings = complete_settings(keys)
    train(num_processes, settings, out)
    shutil.rmtree(GOLDEN / "checkpoints" / name, ignore_errors=True)
    golden_step = out / "checkpoints" / f"step_{RESUMED_STEP:08d}"
    stored_checkpoint = GOLDEN / "checkpoints" / name
    shutil.copytree(golden_step, stored_checkpoint)
    # without the folder of this clone
    state_file = stored_checkpoint / "state.json"
    state_file.write_text(state_file.read_text().replace(f"{ROOT}/", ""))
    write_checksums(stored_checkpoint)
    return {
        "settings": settings,
        "made": describe_machine(),
        "digest": compute_digest(out),
        "steps": read_steps(out),
    }


def compute_bits(name: str, settings: dict) -> dict:
    """Return digest and steps of a run on this machine, by the step from which it is trained."""
    bits = {}
    for first_step in (0, RESUMED_STEP):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            if first_step:
                copy_checkpoint(name, first_step, out)
            train(RUNS[name][0], settings, out)
            bits[first_step] = {"digest": compute_digest(out), "steps": read_steps(out)}
    return bits


def regenerate(names: list[str]) -> None:
    """Regenerate the named runs and corpora.

    Args:
        names: of runs and corpora; "corpus" is the one on which the runs are trained; "here" alone
            adds, for every run, the bits that this machine's kind of processor computes, by code
            that is known to be right
    """
    if "corpus" in names:
        write_corpus()
    golden = read_optional_json(RECORD) or {"runs": {}, "corpora": {}}
    for name in names:
        if name in RUNS:
            golden["runs"][name] = write_run(name)
            print(name, flush=True)
    if names == ["here"]:
        machine = describe_machine()
        for name, run in golden["runs"].items():
            bits = compute_bits(name, run["settings"])
            others = [other for other in run.get("others", []) if other["made"] != machine]
            run["others"] = [*others, {"made": machine, "begun": bits}]
            print(name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        for name in names:
            if name in CORPORA:
                golden["corpora"][name] = prepare_and_hash(name, Path(folder))
    write_json(RECORD, golden)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with reproducible_order():
        regenerate(sys.argv[1:])
