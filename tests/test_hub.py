"""Data sets of the hub, on a local clone of one; the hub itself is played by the test."""

import json
import sys
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, one_line_error, script

from data import hub, tokenizer
from data.fineweb_edu import prepare
from data.hub import Hub
from data.shards import open_corpus

README = """---
configs:
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
- config_name: other
  data_files:
  - split: train
    path: other/*
---
# FineWeb-Edu
"""
TEXTS = [f"document {i}, größe " * (i % 7) for i in range(500)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with two configurations; every fifth row of the first is null. One file is larger than a row group."""
    root = tmp_path_factory.mktemp("clone")
    (root / "README.md").write_text(README)
    rows = [row for i, text in enumerate(TEXTS) for row in ([text, None] if i % 5 == 0 else [text])]
    parts = {"sample/10BT/000": rows[:90], "sample/10BT/001": rows[90:500], "sample/10BT/002": rows[500:]}
    for name, part in {**parts, "other/000": ["another configuration"]}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        table = pa.table({"id": range(len(part)), "text": part, "score": [1.0] * len(part)})
        pq.write_table(table, root / f"{name}.parquet", row_group_size=60)
    return root


@pytest.fixture(autouse=True)
def _bytes_for_gpt2(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", tokenizer.byte_tokenizer)
    monkeypatch.setattr(hub, "ROWS", 32)


def texts(batches):
    return [text for batch in batches for text in batch.texts]


def test_rows_come_in_order_and_null_is_none(clone):
    assert texts(Hub(str(clone), "sample-10BT").read()) == TEXTS
    assert texts(Hub(str(clone), "other").read()) == ["another configuration"]
    assert Hub(str(clone), "other").text_bytes() is None


def test_starts_are_told_row_by_row(clone):
    batches = list(Hub(str(clone), "sample-10BT", starts=lambda text: "7," in text).read())
    assert all(batch.starts == ["7," in text for text in batch.texts] for batch in batches)
    assert {True, False} == {start for batch in batches for start in batch.starts}


def test_reading_goes_on_from_every_cursor(clone):
    """With the same batches: a position counts tokens from its cursor."""
    source = Hub(str(clone), "sample-10BT")
    batches = list(source.read())
    assert len(batches) > 15
    expected = [batch.texts for batch in batches]
    for index, batch in enumerate(batches):
        rest = list(source.read(json.loads(json.dumps(batch.cursor))))
        assert [batch.texts for batch in rest] == expected[index:]


def test_identity_tells_what_is_read():
    """Each of these changes the documents; `tokens` is a guess, and `starts` belongs to the script."""
    keys = {"repository": "a", "name": "b", "split": "c", "column": "d", "revision": "e"}
    first = Hub(**keys).identity()
    assert first == Hub(**keys, tokens=5).identity() == json.loads(json.dumps(first))
    for key in keys:
        assert Hub(**{**keys, key: "other"}).identity() != first


def run(monkeypatch, out, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"--out={out}", "--sample=sample-10BT", *map(str, arguments)])
    prepare.main()
    return open_corpus(str(out))


STREAM = [token for text in TEXTS for token in (256, *text.encode())]
SMALL = ["--val_tokens=2000", "--shard_tokens=1500"]


def test_fineweb_edu_from_a_clone_grows_as_at_once(clone, tmp_path, monkeypatch):
    for limit in (2100, 9999, None):
        more = [f"--max_tokens={limit}"] * (limit is not None)
        corpus = run(monkeypatch, tmp_path / "out", f"--repository={clone}", *SMALL, *more)
        assert np.concatenate(corpus.val + corpus.train).tolist() == STREAM[:limit]
    assert corpus.meta["source"] == str(clone)
    assert corpus.meta["name"] == "sample-10BT"
    assert not {"revision", "commit"} & corpus.meta.keys()


@pytest.fixture
def online(clone, monkeypatch):
    """A hub whose data set is the clone and whose newest commit is `commits[-1]`; `asked` records revisions."""
    state = SimpleNamespace(commits=["c0ffee"], asked=[], infos=[])
    load = datasets.load_dataset

    def load_dataset(repository, name, *, split, revision, streaming):
        assert (repository, streaming) == ("org/set", True)
        state.asked.append(revision)
        return load(str(clone), name, split=split, streaming=True)

    def dataset_info(self, repository, revision=None):
        assert repository == "org/set"
        state.infos.append(revision)
        return SimpleNamespace(sha=state.commits[-1])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    return state


def test_what_is_resumed_is_the_commit_that_was_begun(online, tmp_path, monkeypatch):
    arguments = [tmp_path / "out", "--repository=org/set", *SMALL]
    run(monkeypatch, *arguments, "--max_tokens=3000")
    online.commits.append("newer")
    questions = len(online.infos)
    corpus = run(monkeypatch, *arguments)
    assert set(online.asked) == {"c0ffee"}
    assert len(online.infos) == questions  # not asked again: a preparation may end offline
    assert corpus.meta["commit"] == "c0ffee"
    assert np.concatenate(corpus.val + corpus.train).tolist() == STREAM
    corpus = run(monkeypatch, *arguments, "--overwrite")
    assert corpus.meta["commit"] == "newer"
    assert online.asked[-1] == "newer"


def test_a_revision_is_resolved_to_its_commit(online, tmp_path, monkeypatch):
    corpus = run(monkeypatch, tmp_path / "out", "--repository=org/set", "--revision=v1.0", *SMALL)
    assert set(online.infos) == {"v1.0"}
    assert (corpus.meta["commit"], set(online.asked)) == ("c0ffee", {"c0ffee"})


def test_another_revision_is_not_silently_the_first_one(online, tmp_path, monkeypatch, capsys):
    arguments = [tmp_path / "out", "--repository=org/set", *SMALL]
    run(monkeypatch, *arguments, "--revision=v1.0", "--max_tokens=3000")
    online.commits.append("newer")
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments, "--revision=v2.0")
    assert "revision" in capsys.readouterr().err


class GatedRepoError(Exception):
    pass


class RepositoryNotFoundError(Exception):
    pass


class ConnectTimeoutError(ConnectionError):
    pass


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            GatedRepoError("403\nlong\nstory"),
            r"accept its terms on its page, then `hf auth login` \(GatedRepoError: 403\)",
        ),
        (OSError("Dataset org/set is a gated dataset"), "accept its terms on its page, then `hf auth login`"),
        (RepositoryNotFoundError("404"), "no such data set or revision; if it is private, `hf auth login`"),
        (ConnectTimeoutError("slow"), "no connection to the hub: try again, or give local files by --source"),
        (RuntimeError(""), r"try again, .* by --source, or --repository=FOLDER \(RuntimeError: RuntimeError\)"),
    ],
)
@pytest.mark.parametrize("where", ["dataset_info", "load_dataset"])
def test_what_the_hub_raises_becomes_advice(online, tmp_path, monkeypatch, error, advice, where):
    def refuse(*arguments, **keys):
        raise error

    monkeypatch.setattr(*((datasets, where) if where == "load_dataset" else (huggingface_hub.HfApi, where)), refuse)
    source = Hub("org/set", "sample-10BT")
    act = source.pin if where == "dataset_info" else lambda: list(source.read())
    with pytest.raises(ValueError, match=rf"^org/set \(sample-10BT\) cannot be read: {advice}") as found:
        act()
    assert "\n" not in str(found.value)
    assert found.value.__cause__ is error


def test_a_connection_that_breaks_keeps_whole_shards(online, tmp_path, monkeypatch, capsys):
    rows = datasets.IterableDataset.iter

    def breaking(self, batch_size):
        for index, batch in enumerate(rows(self, batch_size)):
            if index == 7:
                raise ConnectionResetError("by peer")
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(datasets.IterableDataset, "iter", breaking)
        with pytest.raises(SystemExit):
            run(monkeypatch, tmp_path / "out", "--repository=org/set", *SMALL)
    line = capsys.readouterr().err
    assert "no connection to the hub" in line
    assert "ConnectionResetError: by peer" in line
    end = int(line.split("--max_tokens=")[1].split()[0])
    assert end >= 2000 + 1500

    def offline(*arguments, **keys):
        raise ConnectionError

    with monkeypatch.context() as patch:  # what is whole needs no hub
        patch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
        patch.setattr(datasets, "load_dataset", offline)
        corpus = run(monkeypatch, tmp_path / "out", "--repository=org/set", *SMALL, f"--max_tokens={end}")
    assert np.concatenate(corpus.val + corpus.train).tolist() == STREAM[:end]
    corpus = run(monkeypatch, tmp_path / "out", "--repository=org/set", *SMALL)
    assert np.concatenate(corpus.val + corpus.train).tolist() == STREAM


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "sample-100BT"}, r"\(sample-100BT\) cannot be read: .*sample-100BT.* not found"),
        ({"split": "test"}, r"\(sample-10BT\) cannot be read: .*Bad split: test"),
        ({"column": "body"}, r"\(sample-10BT\) cannot be read: .*body.* not in the dataset"),
    ],
)
def test_what_a_data_set_does_not_have_is_named(clone, keys, message):
    with pytest.raises(ValueError, match=message) as error:
        list(Hub(str(clone), **{"name": "sample-10BT", **keys}).read())
    assert "\n" not in str(error.value)


def test_a_damaged_file_of_a_clone_ends_in_one_line(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no parquet PAR1")
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be read: ") as error:
        list(Hub(str(tmp_path), None).read())
    assert "\n" not in str(error.value)


def test_offline_one_line_names_source(tmp_path):
    prepare_script = ROOT / "data" / "fineweb_edu" / "prepare.py"
    arguments = [prepare_script, "--tokenizer=bytes", f"--out={tmp_path / 'out'}"]
    line = one_line_error(script(*arguments, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}))
    assert "HuggingFaceFW/fineweb-edu (sample-100BT) cannot be read: no connection to the hub" in line
    assert "give local files by --source" in line
    assert not list((tmp_path / "out").iterdir())
