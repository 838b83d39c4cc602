"""The corpus of the standard library with its tests, on a small library whose files are known."""

import random
import sysconfig

import numpy as np
import pytest
from helpers import one_line_error
from in_process import call
from near_duplicates_helpers import change_words, write_words

from data import tokenizer
from data.shards import Corpus, open_corpus

SCRIPT = "data/python_library/prepare.py"


def write_source(seed: int) -> str:
    return "\n".join(write_words(random.Random(seed), 120)) + "\n"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Write a library of twelve modules and tests, a near copy of each test, and other files."""
    folder = tmp_path / "library"
    files = {f"module_{number}.py": write_source(number) for number in range(6)}
    for number in range(6):
        source = write_source(100 + number)
        files[f"test/test_{number}.py"] = source
        words = change_words(random.Random(number), source.split(), 2)
        files[f"test/copies/copy_{number}.py"] = "\n".join(words) + "\n"
    files["table.py"] = "x = [" + "1, " * 400 + "]\n"
    files["long_lines.py"] = ("y" * 101 + "\n") * 9
    files["empty.py"] = " \n"
    files["site-packages/package.py"] = write_source(200)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "latin.py").write_bytes("größe = 1\n".encode("latin-1"))
    get_path = sysconfig.get_path
    monkeypatch.setattr(
        sysconfig, "get_path", lambda name: str(folder) if name == "stdlib" else get_path(name)
    )
    return folder


def prepare(out, *options: str) -> Corpus:
    result = call(SCRIPT, f"--out={out}", "--vocab_size=300", "--workers=1", *options)
    assert result.returncode == 0, result.stderr.decode()
    return open_corpus(str(out))


def read_documents(corpus: Corpus, split: str) -> list[str]:
    encoding = tokenizer.read(corpus.path)
    tokens = np.concatenate(getattr(corpus, split)).tolist()
    return encoding.decode(tokens).split("<|endoftext|>")[1:]


def test_modules_and_tests_are_documents_and_near_copies_are_not(library, tmp_path):
    corpus = prepare(tmp_path / "out")
    documents = read_documents(corpus, "val") + read_documents(corpus, "train")
    for number in range(6):
        assert write_source(number) in documents
        copy = (library / "test" / "copies" / f"copy_{number}.py").read_text()
        # whichever comes first by its hash is kept
        assert (write_source(100 + number) in documents) != (copy in documents)
    assert len(documents) == 12
    assert corpus.meta["near_duplicates"] == 6


LEFT_OUT = ["table.py", "long_lines.py", "empty.py", "latin.py", "site-packages/package.py"]


def test_validation_ends_with_the_document_that_completes_its_share(library, tmp_path):
    left_out = [library / path for path in LEFT_OUT]
    total = sum(path.stat().st_size for path in library.rglob("*.py") if path not in left_out)
    corpus = prepare(tmp_path / "out", "--val_share=0.3")
    sizes = [len(document.encode()) for document in read_documents(corpus, "val")]
    assert sum(sizes[:-1]) < 0.3 * total <= sum(sizes)


def test_a_prepared_corpus_is_verified(library, tmp_path):
    prepare(tmp_path / "out")
    result = call(SCRIPT, "--verify", f"--out={tmp_path / 'out'}")
    assert result.returncode == 0


def test_a_share_that_leaves_a_split_without_files_is_refused(library, tmp_path):
    result = call(SCRIPT, f"--out={tmp_path / 'out'}", "--val_share=0.99")
    assert "--val_share=0.99 leaves no file of" in one_line_error(result)


def test_an_unknown_option_is_one_line():
    assert "unknown key --vall_share" in one_line_error(call(SCRIPT, "--vall_share=0.1"))
