"""Test data sets of the Hub: on a local clone, and on a local server whose answers fail."""

import functools
import gzip
import io
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from helpers import ROOT, one_line_error, run_script, write_parquet
from hub_server import Fault
from in_process import call

from data import hub, sources
from data.hub import HubDataset
from data.shards import open_corpus

FINEWEB = "data/fineweb_edu/prepare.py"
README = """---
configs:
- {config_name: sample-10BT, data_files: [{split: train, path: sample/10BT/*}]}
- {config_name: other, data_files: [{split: train, path: other/*}]}
---
"""
DOCUMENTS = [f"document {i}: größe " + f"{i * i} " * (i % 150) for i in range(1000)]
TOKENS = [token for text in DOCUMENTS for token in (256, *text.encode())]
OPTIONS = [
    "--sample=sample-10BT",
    "--tokenizer=bytes",
    "--val_tokens=30000",
    "--shard_tokens=20000",
    # more than there are; the whole sample would need a disk of 80 GB
    "--max_tokens=600000",
]


def parquet_bytes(texts) -> bytes:
    content = io.BytesIO()
    write_parquet(content, texts, 40, compression="none", use_dictionary=False)
    return content.getvalue()


def make_repository(texts) -> dict[str, bytes]:
    """Return files in FineWeb-Edu's layout; the second of three is the largest, some rows are null."""
    files = {"README.md": README.encode(), "other/000.parquet": parquet_bytes(["another"])}
    for number, (first, last) in enumerate(((0, 60), (60, 800), (800, 1000))):
        rows = [*texts[first:last], None]
        files[f"sample/10BT/{number:03d}.parquet"] = parquet_bytes(rows)
    return files


def read_files(folder) -> dict[str, bytes]:
    paths = [path for path in sorted(Path(folder).iterdir()) if path.is_file()]
    return {path.name: path.read_bytes() for path in paths}


def test_json_lines_of_a_data_set_are_read(tmp_path):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    batches = HubDataset(str(tmp_path)).read()
    assert [text for batch in batches for text in batch.texts] == DOCUMENTS


def read_tokens(corpus) -> list[int]:
    return np.concatenate(corpus.val + corpus.train).tolist()


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Write a local clone of the data set."""
    root = tmp_path_factory.mktemp("clone")
    for name, content in make_repository(DOCUMENTS).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_a_clone_is_read_from_every_cursor(clone, monkeypatch):
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 5000)
    source = HubDataset(str(clone), "sample-10BT")
    batches = list(source.read())
    assert [text for batch in batches for text in batch.texts] == DOCUMENTS
    for index in range(0, len(batches), 5):
        rest = list(source.read(json.loads(json.dumps(batches[index].cursor))))
        assert [batch.texts for batch in rest] == [batch.texts for batch in batches[index:]]


def test_git_may_fetch_into_a_clone(clone, tmp_path):
    copy = shutil.copytree(clone, tmp_path / "copy")
    identity = HubDataset(str(copy), "sample-10BT").identity()
    (copy / ".git").mkdir()
    (copy / ".git" / "FETCH_HEAD").write_text("abc")
    assert HubDataset(str(copy), "sample-10BT").identity() == identity
    (copy / "data.parquet").write_text("abc")
    assert HubDataset(str(copy), "sample-10BT").identity() != identity


def test_a_clone_is_prepared(clone, tmp_path):
    result = call(FINEWEB, f"--repository={clone}", *OPTIONS, f"--out={tmp_path / 'out'}")
    assert result.returncode == 0, result.stderr
    corpus = open_corpus(str(tmp_path / "out"))
    assert read_tokens(corpus) == TOKENS
    assert {"source": str(clone), "name": "sample-10BT"}.items() <= corpus.meta.items()
    assert not {"revision", "commit"} & corpus.meta.keys()


DATASET = {"repository": "a", "name": "b", "split": "c", "column": "d", "revision": "e"}


@pytest.mark.parametrize("key", DATASET)
def test_the_identity_of_a_data_set_depends_on_what_is_read(key):
    assert HubDataset(**{**DATASET, key: "other"}).identity() != HubDataset(**DATASET).identity()


def test_the_identity_of_a_data_set_does_not_depend_on_the_estimate_of_tokens():
    identity = HubDataset(**DATASET).identity()
    assert HubDataset(**DATASET, num_tokens=5).identity() == identity
    assert json.loads(json.dumps(identity)) == identity


# ---- over HTTP ----


NAME = "org/fineweb-edu"


def commit_documents(server) -> str:
    """Commit the data set after one with other documents, and return the name of the commit."""
    server.commits.pop(NAME, None)
    server.commit(NAME, make_repository(DOCUMENTS[::-1]))
    return server.commit(NAME, make_repository(DOCUMENTS))


@pytest.fixture
def commit(server) -> Iterator[str]:
    name = commit_documents(server)
    server.faults = []
    server.log = []
    yield name
    server.faults = []


@pytest.fixture(scope="module")
def undisturbed_files(server, client, tmp_path_factory) -> dict[str, bytes]:
    """Return the files of a preparation that nothing disturbs."""
    out = tmp_path_factory.mktemp("undisturbed_files")
    commit_documents(server)
    result = client(FINEWEB, f"--out={out}", f"--repository={NAME}", *OPTIONS)
    assert result.code == 0
    assert result.err == ""
    assert read_tokens(open_corpus(str(out))) == TOKENS
    assert not list(out.glob("**/*.parquet"))  # a file that was read is removed
    return read_files(out)


FILES = "/cdn/.*10BT"


def test_temporary_faults_leave_no_trace(server, client, commit, undisturbed_files, tmp_path):
    """The hub is down for half a second, cuts two files and shortens one."""
    server.faults = [
        Fault("status", seconds=0.5),
        Fault("cut", FILES, times=2),
        Fault("short", FILES, times=1),
    ]
    result = client(FINEWEB, f"--out={tmp_path}", f"--repository={NAME}", *OPTIONS)
    assert result.code == 0, result.err
    assert read_files(tmp_path) == undisturbed_files
    assert {kind for _, kind in server.log} == {None, "status", "cut", "short"}
    assert all("; retrying in " in line for line in result.err.splitlines())


class Interrupted(NamedTuple):
    """A preparation that a missing file has ended, and that a newer commit could disturb."""

    out: Path
    message: str
    prepare: Callable[..., SimpleNamespace]  # runs the same command, with further options


@pytest.fixture
def interrupted(server, client, commit, tmp_path) -> Interrupted:
    prepare = functools.partial(
        client, FINEWEB, f"--out={tmp_path}", f"--repository={NAME}", *OPTIONS
    )
    server.faults = [Fault("status", FILES, 404, skip=2)]
    result = prepare()
    assert result.code == 2
    server.faults = []
    server.log = []
    server.commit(NAME, make_repository(["newer"] * 1000))
    return Interrupted(tmp_path, result.err, prepare)


def test_a_resumed_preparation_keeps_its_commit(server, commit, interrupted, undisturbed_files):
    advice = "give local files with --source, or a local clone with --repository=FOLDER"
    assert advice in interrupted.message
    assert "complete shards are kept" in interrupted.message
    result = interrupted.prepare()
    assert result.code == 0
    assert result.err == ""
    assert read_files(interrupted.out) == undisturbed_files
    # it requests neither the files before the one it stood in nor the name of the latest commit
    paths = [path for path, _ in server.log]
    assert not [path for path in paths if "/cdn/" in path and "10BT/000" in path]
    assert not [path for path in paths if path.endswith(f"/datasets/{NAME}")]

    # neither another revision nor a commit that was removed can continue it
    other = interrupted.prepare(f"--revision={next(iter(server.commits[NAME]))}")
    assert "shards that were prepared with other options (" in other.err
    del server.commits[NAME][commit]
    (interrupted.out / "fineweb_edu_train_000004.bin").unlink()
    assert re.search(f"Revision Not Found .*{commit}", interrupted.prepare().err)


def test_overwrite_starts_again_from_the_latest_commit(server, interrupted):
    result = interrupted.prepare("--val_tokens=3000", "--overwrite")
    assert result.code == 0, result.err
    latest = list(server.commits[NAME])[-1]
    assert open_corpus(str(interrupted.out)).meta["commit"] == latest


PERMANENT_ERRORS = {
    "no data set": (
        ["--repository=org/nothing"],
        [],
        "Please make sure you specified the correct `repo_id`",
    ),
    "no column": (
        ["--column=body"],
        [],
        "has no column body; name one of its columns with --column: text, id, score, token_count",
    ),
    "no configuration": (["--sample=sample-350BT"], [], "'sample-350BT' not"),
    "no revision": (["--revision=v9"], [], "Revision Not Found for url"),
    "no terms": ([], [Fault("status", "/resolve/", 403)], "403"),
    "no patience": (
        ["--retry_minutes=0"],
        [Fault("status", FILES)],
        "gave up after --retry_minutes=0",
    ),
}


@pytest.mark.parametrize("case", PERMANENT_ERRORS)
def test_a_permanent_error_ends_the_preparation_in_one_line(server, client, commit, tmp_path, case):
    options, server.faults, message = PERMANENT_ERRORS[case]
    out = tmp_path / "out"
    result = client(FINEWEB, f"--out={out}", f"--repository={NAME}", *OPTIONS, *options)
    assert result.code == 2, result.err
    [line] = result.err.splitlines()
    assert message in line
    assert ("rerun the same command" in line) is (case == "no patience")


def test_a_corrected_option_is_not_another_preparation(client, commit, tmp_path):
    prepare = functools.partial(
        client, FINEWEB, f"--out={tmp_path / 'out'}", f"--repository={NAME}", *OPTIONS
    )
    assert prepare("--column=body").code == 2
    assert prepare().code == 0


def test_an_offline_machine_is_offered_local_files(tmp_path):
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    out = tmp_path / "out"
    result = run_script(ROOT / FINEWEB, "--tokenizer=bytes", f"--out={out}", env=environment)
    line = one_line_error(result)
    assert "HuggingFaceFW/fineweb-edu (sample-100BT) cannot be read (OfflineModeIsEnabled" in line
    assert "give local files with --source" in line
    assert list(out.iterdir()) == [out / "lock"]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = call(FINEWEB, "--tokenizer=bytes", f"--out={tmp_path / 'out'}")
    message = "reading from the Hugging Face Hub needs the huggingface_hub package"
    assert message in one_line_error(result)


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """Replace the clock of retries, and return the list of the pauses that they make."""
    clock = SimpleNamespace(seconds=0.0)
    lengths = []

    def sleep(seconds: float) -> None:
        lengths.append(seconds)
        clock.seconds += seconds

    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=lambda: clock.seconds, sleep=sleep))
    return lengths


def refuse_connection():
    raise RuntimeError("outer") from ConnectionError("down")


def test_pauses_grow_up_to_the_limit_and_are_announced(pauses, capsys):
    message = r"^it cannot be read \(ConnectionError: down\); gave up after --retry_minutes=5$"
    with pytest.raises(hub.RetriesExhausted, match=message):
        hub.retry(refuse_connection, "it", 5)
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert sum(pauses) == 300
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "it: ConnectionError: down; retrying in 2 s (4:59 left)"
    assert len(lines) == len(pauses)


FETCH_FROM_CLOSED_PORT = """
import time
from hf_xet import XetFileInfo
from huggingface_hub.utils._xet import get_xet_session
from data import hub

server = "http://127.0.0.1:9"
try:
    with get_xet_session().new_file_download_group(
        endpoint=server,
        token="x",
        token_expiry_unix_secs=int(time.time()) + 3600,
        token_refresh_url=server,
        token_refresh_headers={},
        custom_headers={},
    ) as group:
        group.start_download_file(XetFileInfo("a" * 64, 10), "/nowhere")
except RuntimeError as error:
    print(hub.describe_transient(error))
"""


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        *(
            (OSError("refused"), status, f"the Hub responds with status {status}")
            for status in (429, 408, 500)
        ),
        *((OSError("refused"), status, None) for status in (404, 403)),
        (RuntimeError("no space left on device (os error 28)"), None, None),
        (OSError("no such file"), None, None),
    ],
)
def test_temporary_errors_alone_are_retried(error, status, message):
    if status is not None:
        error.response = SimpleNamespace(status_code=status)
    assert hub.describe_transient(error) == message


def test_an_unreachable_server_of_large_files_is_retried():
    """hf_xet, which downloads large files, has only RuntimeError for it."""
    pytest.importorskip("hf_xet")
    result = run_script("-c", FETCH_FROM_CLOSED_PORT, env={"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1"})
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.decode().startswith("RuntimeError: ")


@pytest.fixture(params=["refuses", pytest.param("is silent", marks=pytest.mark.slow)])
def unreachable_hub(request) -> Iterator[str]:
    """Yield an address that refuses connections, or that accepts them and never answers."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            closed.listen(9)
        yield f"http://127.0.0.1:{closed.getsockname()[1]}"


FETCH_TOKENIZER = """
from data import hub

for file in ("tokenizer.json", "tokenizer_config.json"):
    try:
        hub.fetch_model_file("org/name", file, {retry_minutes})
    except hub.HubUnreachable as error:
        print(error)
"""


@pytest.mark.parametrize("retry_minutes", [None, 0])
def test_a_hub_that_cannot_be_reached_is_an_error_at_once(unreachable_hub, retry_minutes, tmp_path):
    environment = {"HF_ENDPOINT": unreachable_hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": ""}
    script = FETCH_TOKENIZER.format(retry_minutes=retry_minutes)
    result = run_script("-c", script, env=environment)
    assert result.returncode == 0, result.stderr.decode()
    assert result.stderr == b""
    messages = result.stdout.decode().splitlines()
    for message, file in zip(messages, ("tokenizer.json", "tokenizer_config.json"), strict=True):
        start = f"{file} of org/name cannot be downloaded: {unreachable_hub} cannot be reached ("
        assert message.startswith(start)
        assert "--retry_minutes=60" in message


READ_CARD = """
from pathlib import Path
from data import hub

def download():
    return hub.import_hub().hf_hub_download("org/fineweb-edu", "README.md", repo_type="dataset")

print(Path(hub.retry(download, "card")).read_text())
"""


def test_a_hub_that_cannot_be_reached_is_replaced_by_the_cache(
    server, commit, unreachable_hub, tmp_path
):
    for endpoint in (server.url, unreachable_hub):
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": ""}
        result = run_script("-c", READ_CARD, env=environment)
        assert result.stdout.decode().strip() == README.strip(), result.stderr.decode()


def test_ctrl_c_in_a_pause_is_one_line(tmp_path, monkeypatch):
    def press_ctrl_c(seconds):
        os.kill(os.getpid(), signal.SIGINT)

    def fail():
        raise ConnectionError("down")

    monkeypatch.setattr(HubDataset, "pin", lambda source, commit: source.ask(fail))
    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=time.monotonic, sleep=press_ctrl_c))
    result = call(FINEWEB, f"--out={tmp_path}", *OPTIONS, "--retry_minutes=9")
    retry_line, last_line = result.stderr.decode().splitlines()
    assert "ConnectionError: down; retrying in 1 s (8:59 left)" in retry_line
    assert result.returncode == 130
    assert last_line == "prepare.py: interrupted"


def test_a_file_that_was_read_is_removed(clone, tmp_path, monkeypatch):
    """A preparation needs the room of one file of the data set."""
    files = sorted(clone.glob("sample/10BT/*.parquet"))
    source = HubDataset("org/name", download_folder=tmp_path)
    source.files = [f"hf://datasets/org/name@commit/{file.name}" for file in files]

    def download(name):
        assert not list(tmp_path.iterdir())
        return str(shutil.copy(clone / "sample" / "10BT" / name, tmp_path))

    monkeypatch.setattr(source, "download", download)
    assert [text for batch in source.read() for text in batch.texts] == DOCUMENTS
    assert not list(tmp_path.iterdir())


def test_a_split_that_is_missing_is_named(clone):
    message = r"\(sample-10BT\) has no split test; its splits are train$"
    with pytest.raises(ValueError, match=message):
        list(HubDataset(str(clone), "sample-10BT", "test").read())


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "train.txt").write_text("a\n")
    message = r"because .*/train\.txt is not a file of the kinds .*; give --revision=refs/convert"
    with pytest.raises(sources.PermanentSourceError, match=message):
        list(HubDataset(str(tmp_path)).read())
