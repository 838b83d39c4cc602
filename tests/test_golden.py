"""Runs and shards that an earlier version of this code left, and that today's must go on from:
`pytest -m golden`.

`tests/golden/` holds, for every stem, the checkpoint of a tiny run at step 6 and, in golden.json,
the settings, losses and gradient norms of its ten steps with a digest of all that it ended with;
and the SHA-256 of the shards that each corpus's script made of the texts below. On the machine and
torch that wrote them a run must end with the same bits; elsewhere, where products are summed in
another order, its losses must be close.

    PYTHONPATH=. python tests/test_golden.py NAME ...   writes anew what a change is meant to change
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

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import change_default, write_checksums
from in_process import call, train_in_processes

from data.shards import read_optional_json, write_json, write_shard
from model import MODEL_NAMES, model_class
from model.options import legacy_defaults
from training import checkpoint, metrics
from training.config import TrainConfig

ROOT = Path(__file__).parents[1]

GOLDEN = ROOT / "tests" / "golden"
RECORD = GOLDEN / "golden.json"
STEPS, BEGIN = 10, 6
# Relative losses on another machine. Rounding is enlarged by Muon's Newton-Schulz steps at once,
# and by AdamW, which divides by small moments at first, after some steps.
CLOSE, LATER, STAYS_CLOSE = {"adamw": 1e-4, "muon": 1e-2}, 1e-2, 4

RUN = {
    "seed": 3,
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "kernels": "off",
    "engine": "ddp",
}
RUN |= {
    "max_steps": STEPS,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "optimizer": "adamw",
    "grad_clip": 1.0,
}
RUN |= {
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "schedule": "cosine",
    "warmup_steps": 3,
    "weight_decay": 0.1,
}
RUN |= {
    "beta1": 0.9,
    "beta2": 0.95,
    "eval_interval": 5,
    "eval_batches": 2,
    "eval_full": True,
    "eval_part": "all",
}
RUN |= {"checkpoint_interval": 3, "keep_last": 9}
SIZE = {
    "vocab_size": 257,
    "block_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_size": 8,
}
SIZE |= {"head_dim": 4}
# Keys of a model that do nothing beside the values that these runs have; a run that uses one names
# it.
IDLE = {
    "hidden_size_base",
    "ddl_beta_hidden_size",
    "ddl_k_branch",
    "ddl_k_input",
    "ddl_k_hidden_size",
}
IDLE |= {"ddl_v_constant_value", "mhc_readout_bias_init"}
ADDITIVE, CC, CC_EC = "gpt-mha-rope", "DDL-gpt-mha-rope-CC", "DDL-gpt-mha-rope-CC-EC"
V_MAP = {"ddl_map": "v", "ddl_k_branch": "mlp", "ddl_k_input": "read", "ddl_k_hidden_size": 5}
V_MAP |= {"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 3}
JULY = {"ddl_v_input": "context", "ddl_v_sigmoid": False}
MUP = {"mup": True, "hidden_size_base": 32, "schedule": "wsd", "decay_steps": 4}
MHC = {"model": "mHC-gpt-mha-rope"}
# as in config/mhc_deepseek_v4_small.py and its neighbours
DEEPSEEK_V4 = {
    **MHC,
    "mhc_read_eps": 1e-6,
    "mhc_readout": "sigmoid",
    "mhc_read_dtype": "state",
    "mhc_write_dtype": "state",
    "mhc_scale_init": 1.0,
    "mhc_maps_init_std": 0.02,
    "mhc_bias_init": "zeros",
    "mhc_readout_bias_init": "zeros",
}
GLM_5_3 = {**DEEPSEEK_V4, "mhc_norm_eps": 1e-5, "mhc_readout": "mean"}
del GLM_5_3["mhc_readout_bias_init"]
HUNYUAN_V4 = {
    **MHC,
    "mhc_mix": "identity",
    "mhc_read_eps": 1e-6,
    "mhc_write_eps": 1e-6,
    "mhc_norm_eps": 1e-5,
    "mhc_readout": "sigmoid",
    "mhc_read_dtype": "state",
    "mhc_maps_init_std": 0.006,
    "mhc_readout_bias_init": "mean",
}
# name: (processes, keys); all other keys of the model are given at what was their default.
RUNS = {stem: (1, {"model": stem}) for stem in MODEL_NAMES}
RUNS |= {f"{stem}_muon": (1, {"model": stem, "optimizer": "muon"}) for stem in (ADDITIVE, CC)}
RUNS |= {"v-Map": (1, {"model": "DDL-gpt-mha-rope", **V_MAP}), "July": (1, {"model": CC, **JULY})}
RUNS |= {"muP": (1, {"model": CC_EC, **MUP})}
MAIN_GAIN = {"lambda_input": False, "lambda_values": "none", "lambda_gain": True}
RUNS |= {
    "DeepSeek-V4": (1, DEEPSEEK_V4),
    "GLM-5.3": (1, GLM_5_3),
    "Hunyuan-V4": (1, HUNYUAN_V4),
    "oHC": (1, {**MHC, "mhc_mix": "orthogonal"}),
    "own_erase_gate": (1, {"model": "DDL-gpt-mha-rope", "ddl_erase_gate": "own"}),
    "erase_only": (1, {"model": "DDL-gpt-mha-rope", "ddl_update": "erase_only"}),
    "main_gain": (1, {"model": "Lambdas-gpt-mha-rope", **MAIN_GAIN}),
    "MGT_full_post": (1, {"model": "MGT-gpt-mha", "mgt_arm": "full_post"}),
    "MGT_mhc_pre": (1, {"model": "MGT-gpt-mha", "mgt_arm": "mhc_pre"}),
    "MGT_ddl_post": (1, {"model": "MGT-gpt-mha", "mgt_arm": "ddl_post"}),
    "MGT_branch_mult": (
        1,
        {"model": "MGT-gpt-mha", "mgt_arm": "additive", "residual_branch_mult": 0.38},
    ),
    "no_mixing_decay": (1, {"model": "mHC-gpt-mha-rope", "mixing_decay": False}),
}
for engine in ("ddp", "fsdp"):
    RUNS |= {
        f"{stem}_{engine}": (2, {"model": stem, "engine": engine}) for stem in (ADDITIVE, CC_EC)
    }

DOCUMENTS = [
    "One document.\n",
    "Ümlaute and 日本語: 👩‍👧\n\n",
    "def f(x):\n    return x + 1\n",
    "<|endoftext|> in a text ",
]
DOCUMENTS += [
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
LIMITS = ["--shard_tokens=150", "--val_tokens=60"]
DRAWN = ["--sequences=20", "--val_sequences=8", "--seed=1"]
# name: the script of its corpus, and arguments; sources are the files that `sources` writes.
CORPORA = {
    "text": ["text", "--source", "files", "--tokenizer=bpe", "--vocab_size=300", *LIMITS],
    "fineweb_edu": ["fineweb_edu", "--source", "rows.parquet", *LIMITS],
    "pretokenized": ["fineweb_edu", "--pretokenized=shards"],
    "openwebtext": ["openwebtext", "--source", "rows.jsonl", *LIMITS],
    "wikitext": (
        "wikitext --repository=wikitext --version=2 --tokenizer=bytes --shard_tokens=100"
    ).split(),
    "python_stdlib": ["python_stdlib", "--tokenizer=bytes"],
    "copy_task": ["copy_task", "--half=5", "--symbols=7", *DRAWN],
    "k_hop": ["k_hop", "--hops=2", "--positions=12", *DRAWN],
    "permutations": ["permutations", "--length=4", *DRAWN],
    "recall": ["recall", "--pairs=3", "--positions=16", "--symbols=10", *DRAWN],
    "registers": ["registers", "--registers=3", "--operations=4", *DRAWN],
}


@contextlib.contextmanager
def alone():
    """In the repository's root, with one thread: which decides the order in which products are
    summed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.chdir(ROOT):
            yield
    finally:
        torch.set_num_threads(threads)


def settings_of(keys: dict) -> dict:
    """Every key that decides what the run computes, so that another default changes nothing."""
    config = vars(model_class(keys["model"]).Config(**SIZE))
    idle = IDLE if keys.get("ddl_v_sigmoid", True) else IDLE | {"ddl_v_sigmoid_scale"}
    return {**{key: value for key, value in config.items() if key not in idle}, **RUN, **keys}


def train(processes: int, settings: dict, out: Path) -> None:
    """train.py with these settings, or on from the checkpoint that `out` holds.

    Keys of the model that are newer than the settings have the value that they then had.
    """
    before = legacy_defaults(model_class(settings["model"]).Config)
    if settings["optimizer"] == "muon":
        before["muon_dtype"] = legacy_defaults(TrainConfig)["muon_dtype"]
    given = {**before, **settings, "dataset": "tests/golden/corpus", "out_dir": out}
    arguments = ["--resume=auto", *(f"--{key}={value}" for key, value in given.items())]
    if processes > 1:
        train_in_processes(processes, arguments, out.parent / "log")
    else:
        result = call("train.py", *arguments)
        assert result.returncode == 0, result.stderr.decode()


def steps_of(out: Path) -> list[dict]:
    """Loss and gradient norm of every step, and the validation loss where there was an
    evaluation.
    """
    steps = {}
    for record in metrics.read(out / "metrics.jsonl"):
        kept = {key: record[key] for key in ("loss", "grad_norm", "val_loss") if key in record}
        steps.setdefault(record["step"], {"step": record["step"]}).update(kept)
    return list(steps.values())


def digest_of(out: Path) -> str:
    """SHA-256 over the names and bytes of the weights and the optimizer's state that the run ended
    with.
    """
    result, last = hashlib.sha256(), checkpoint.find(out)
    for kind in ("model", "optimizer"):
        for name, tensor in sorted(checkpoint.load_tensors(last / f"{kind}.safetensors").items()):
            result.update(f"{kind} {name} ".encode() + tensor.contiguous().numpy().tobytes())
    return result.hexdigest()


def here() -> dict:
    """What decides the last bits: the processor, of which few words are too few, and torch."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    kind = dict(
        re.findall(r"^(model name|cpu family|model|stepping)\s*: (.*)$", text, re.MULTILINE)
    )
    return {**kind, "vectors": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def check_run(name: str, out: Path, begin: int) -> None:
    """Train the run from step `begin` on, and hold it to what is kept of it."""
    golden = read_optional_json(RECORD)["runs"][name]
    if begin:
        shutil.copytree(GOLDEN / "checkpoints" / name, out / "checkpoints" / f"step_{begin:08d}")
    with alone():
        train(RUNS[name][0], golden["settings"], out)
    expected, found = [step for step in golden["steps"] if step["step"] > begin], steps_of(out)
    assert [step["step"] for step in found] == [step["step"] for step in expected]
    if bits := bits_here(golden, begin):
        assert found == [step for step in bits["steps"] if step["step"] > begin]
        assert digest_of(out) == bits["digest"]
    for step, wanted in zip(found, expected):
        close = (
            CLOSE[golden["settings"]["optimizer"]] if step["step"] - begin <= STAYS_CLOSE else LATER
        )
        for key in wanted.keys() - {"grad_norm"}:
            assert step[key] == pytest.approx(wanted[key], rel=close), (
                f"{key} of step {step['step']}"
            )


def bits_here(golden: dict, begin: int) -> dict | None:
    """Steps and digest of the run on a machine like this one; None where none was kept."""
    if golden["made"] == here():
        return golden
    others = [each for each in golden.get("others", []) if each["made"] == here()]
    return others[0]["begun"][str(begin)] if others else None


def sources(folder: Path) -> None:
    """The texts as every kind of file that corpora are made of."""
    (folder / "files").mkdir()
    for index, text in enumerate(DOCUMENTS):
        (folder / "files" / f"{index}.txt").write_text(text, encoding="utf-8")
    pq.write_table(pa.table({"text": DOCUMENTS}), folder / "rows.parquet", row_group_size=2)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    )
    (folder / "wikitext").mkdir()
    parts = "\n".join(
        f"  - {{split: {part}, path: {part}.parquet}}" for part in ("train", "validation", "test")
    )
    readme = f"---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n{parts}\n---\n"
    (folder / "wikitext" / "README.md").write_text(readme)
    for index, part in enumerate(("train", "validation", "test")):
        pq.write_table(
            pa.table({"text": WIKI[index:] * 3}), folder / "wikitext" / f"{part}.parquet"
        )
    (folder / "shards").mkdir()
    for name, count in (("train_000001", 300), ("val_000000", 90)):
        write_shard(
            folder / "shards" / f"fineweb_{name}.bin", np.arange(50256, 50256 - 7 * count, -7)
        )
    for library in ("stdlib", "packages"):
        for index in range(6):
            path = folder / library / f"p{index}" / "module.py"
            path.parent.mkdir(parents=True)
            path.write_text(
                f"# {library} {index}\n"
                + "".join(f"x{i} = {i * index}\n" for i in range(9 + index))
            )


def shards_of(name: str, folder: Path) -> dict[str, str]:
    """SHA-256 of the shards that the corpus's script makes there, by file."""
    corpus, *arguments = CORPORA[name]
    libraries = {"stdlib": str(folder / "stdlib"), "purelib": str(folder / "packages")}
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sysconfig.get_path", libraries.__getitem__)
        result = call(f"data/{corpus}/prepare.py", f"--out=made/{name}", "--workers=2", *arguments)
        assert result.returncode == 0, result.stderr.decode()
    files = sorted((folder / "made" / name).glob("*.bin"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def source_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    sources(folder)
    return folder


@pytest.mark.golden
@pytest.mark.parametrize("begin", [0, BEGIN])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_begins_and_goes_on_as_it_did(name, begin, tmp_path):
    check_run(name, tmp_path / "run", begin)


@pytest.mark.golden
@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_has_the_same_shards(name, source_files):
    assert shards_of(name, source_files) == read_optional_json(RECORD)["corpora"][name]


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of what is kept of the run CC, to be changed."""
    record, folder = read_optional_json(RECORD)["runs"][CC], tmp_path / "golden"
    shutil.copytree(GOLDEN / "checkpoints" / CC, folder / "checkpoints" / CC)
    monkeypatch.setattr(f"{__name__}.GOLDEN", folder)
    monkeypatch.setattr(f"{__name__}.RECORD", folder / "golden.json")
    return folder / "checkpoints" / CC, record


@pytest.mark.golden
def test_a_changed_bit_is_seen(copied, tmp_path):
    folder, record = copied
    if not bits_here(record, BEGIN):
        pytest.skip("written on another machine: losses are only close")
    write_json(RECORD, {"runs": {CC: record}})
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-100] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    write_checksums(folder)
    with pytest.raises(AssertionError):
        check_run(CC, tmp_path / "run", BEGIN)


@pytest.mark.golden
@pytest.mark.parametrize("facts", [{}, {"before": 4.0}], ids=["undeclared", "declared"])
def test_a_key_that_came_later_is_seen_unless_it_declares_what_was_before(
    copied, tmp_path, monkeypatch, facts
):
    """As if this key were newer than the run, and not 4 by default, which the run has always
    computed with.
    """
    folder, record = copied
    settings = {
        name: value for name, value in record["settings"].items() if name != "ddl_v_sigmoid_scale"
    }
    write_json(RECORD, {"runs": {CC: {**record, "settings": settings}}})
    state = json.loads((folder / "state.json").read_text())
    del state["model_config"]["ddl_v_sigmoid_scale"]
    (folder / "state.json").write_text(json.dumps(state))
    write_checksums(folder)
    change_default(monkeypatch, model_class(CC), "ddl_v_sigmoid_scale", float, 1.0, **facts)
    seen = contextlib.nullcontext() if facts else pytest.raises(AssertionError)
    with seen:
        check_run(CC, tmp_path / "run", BEGIN)


def write(names: list[str]) -> None:
    """Write what is named anew: runs, corpora, or "corpus", which the runs are trained on; "here":
    besides, the bits that this machine's kind of processor gives for every run, by code that is
    known to be right.
    """
    if "corpus" in names:
        shutil.rmtree(GOLDEN / "corpus", ignore_errors=True)
        limits = "--tokenizer=bytes --val_tokens=400 --max_tokens=4000 --shard_tokens=2000".split()
        result = call(
            "data/text/prepare.py",
            "--source=tests/corpus.txt",
            "--out=tests/golden/corpus",
            *limits,
        )
        assert result.returncode == 0, result.stderr.decode()
        (GOLDEN / "corpus" / "preparation.json").unlink()
    golden = read_optional_json(RECORD) or {"runs": {}, "corpora": {}}
    for name in (name for name in names if name in RUNS):
        processes, keys = RUNS[name]
        out = Path("runs") / "golden" / name  # relative: checkpoints keep it
        shutil.rmtree(out, ignore_errors=True)
        settings = settings_of(keys)
        train(processes, settings, out)
        run = {
            "settings": settings,
            "made": here(),
            "digest": digest_of(out),
            "steps": steps_of(out),
        }
        golden["runs"][name] = run
        shutil.rmtree(GOLDEN / "checkpoints" / name, ignore_errors=True)
        shutil.copytree(out / "checkpoints" / f"step_{BEGIN:08d}", GOLDEN / "checkpoints" / name)
        print(name, flush=True)
    for run_name, run in golden["runs"].items() if names == ["here"] else ():
        begun = {}
        for begin in (0, BEGIN):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                if begin:
                    shutil.copytree(
                        GOLDEN / "checkpoints" / run_name, out / "checkpoints" / f"step_{begin:08d}"
                    )
                train(RUNS[run_name][0], run["settings"], out)
                begun[begin] = {"digest": digest_of(out), "steps": steps_of(out)}
        others = [each for each in run.get("others", []) if each["made"] != here()]
        run["others"] = [*others, {"made": here(), "begun": begun}]
        print(run_name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        sources(Path(folder))
        golden["corpora"] |= {
            name: shards_of(name, Path(folder)) for name in names if name in CORPORA
        }
    write_json(RECORD, golden)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with alone():
        write(sys.argv[1:])
