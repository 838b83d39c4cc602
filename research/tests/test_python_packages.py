"""The corpus of installed packages, on small libraries whose files are known."""

import random
import sys

import pytest
from helpers import one_line_error
from in_process import call
from near_duplicates_helpers import changed, jaccard, written

from data import tokenizer
from data.shards import open_corpus
from research.residual_streams import python_packages as prepare


def source(seed, words=120):
    return "\n".join(written(random.Random(seed), words)) + "\n"


def install(library, name, version, files):
    """A package as pip leaves it: its files, and a RECORD that lists them."""
    info = library / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in files.items():
        (library / path).parent.mkdir(parents=True, exist_ok=True)
        (library / path).write_bytes(text.encode())
    (info / "RECORD").write_text(
        "".join(f"{path},,\n" for path in [*files, f"../../bin/{name}.py"])
    )


EARLIER = ["1191923d669409ea", "42119e8c06bd9bf1"]  # SHA-256, its first half


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Twelve packages, one of which carries copies of all others' modules, near and exact, and a standard library."""
    packages, stdlib = tmp_path / "site-packages", tmp_path / "stdlib"
    modules = {f"p{i}": [source(100 * i + j) for j in range(3)] for i in range(11)}
    for i, (name, texts) in enumerate(modules.items()):
        install(packages, name, f"{i}.0", {f"{name}/m{j}.py": text for j, text in enumerate(texts)})
    copies = {f"vendors/_vendor/{name}.py": texts[0] for name, texts in modules.items()}
    rng = random.Random(9)
    for name, texts in modules.items():
        copies[f"vendors/near/{name}.py"] = "\n".join(changed(rng, texts[1].split(), 2))
    install(packages, "vendors", "3.1", {**copies, "vendors/own.py": source(7777)})
    extra = {"loose.py": source(8001), "loose_too/a.py": source(8002)}
    extra |= {
        "p0/table.py": "x = [" + "1, " * 400 + "]\n",
        "p0/lines.py": ("y" * 101 + "\n") * 9,
        "p0/empty.py": " \n",
    }
    for path, text in extra.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_text(text)
    (packages / "p0" / "latin.py").write_bytes("größe = 1\n".encode("latin-1"))
    (packages / "p0" / "data.txt").write_text(source(1))
    stdlib.mkdir()
    (stdlib / "abc.py").write_text(source(9001))
    (stdlib / "site-packages").mkdir()
    (stdlib / "site-packages" / "none.py").write_text(source(9002))
    monkeypatch.setattr(
        "sysconfig.get_path", lambda name: str({"purelib": packages, "stdlib": stdlib}[name])
    )
    return packages, stdlib, modules


def texts_of(corpus, split):
    encoding = tokenizer.from_json(tokenizer.describe(corpus.path))
    tokens = [int(token) for shard in getattr(corpus, split) for token in shard]
    return encoding.decode(tokens).split("<|endoftext|>")[1:]


def prepared(tmp_path, *arguments):
    arguments = (
        f"--out={tmp_path / 'out'}",
        "--val_share=0.2",
        "--vocab_size=300",
        "--workers=2",
        *arguments,
    )
    made = call("research/residual_streams/python_packages.py", *arguments)
    assert made.returncode == 0, made.stderr.decode()
    return open_corpus(str(tmp_path / "out")), made.stdout.decode()


def test_validation_packages_are_unseen_in_training(libraries, tmp_path):
    _, _, modules = libraries
    corpus, printed = prepared(tmp_path)
    val, train = texts_of(corpus, "val"), texts_of(corpus, "train")
    packages = corpus.meta["packages"]
    assert packages["val"].keys() & packages["train"].keys() == set()
    assert packages["val"]
    assert f"Python=={sys.version.split()[0]}" in packages["train"]
    # The package with the copies is too large for validation, which keeps what training has copies of.
    chosen = [name.partition("==")[0] for name in packages["val"]]
    assert len(modules.keys() & set(chosen)) > 0
    for name in modules.keys() & set(chosen):
        assert set(modules[name]) <= set(val)
    for text in val:
        assert all(jaccard(text, other) < 0.8 for other in train)
    everything = val + train
    assert (
        len(everything) == len(set(everything)) == 11 * 3 + 1 + 2 + 1
    )  # modules, own.py, the loose ones, abc.py
    assert corpus.meta["duplicates"]["threshold"] == 0.8
    assert (
        corpus.meta["duplicates"]["exact"]["documents"]
        == corpus.meta["duplicates"]["near"]["documents"]
        == 11
    )
    assert "11 files (" in printed
    sizes = {
        split: sum(len(text.encode()) for text in texts)
        for split, texts in (("val", val), ("train", train))
    }
    for split, texts in (("val", val), ("train", train)):
        assert sum(packages[split].values()) == sizes[split]
        assert corpus.meta[split]["bytes"] == sizes[split]
        assert corpus.meta[split]["documents"] == len(texts)
    assert (packages["train"] | packages["val"])["loose_too"] == len(source(8002))
    assert {f"p{i}=={i}.0" for i in range(11)} | {"vendors==3.1"} <= (
        packages["train"] | packages["val"]
    ).keys()
    assert corpus.meta["source"] == "Python packages"


def test_the_share_is_of_whole_packages_and_never_more():
    sizes = {f"p{i}==1": 10 + i for i in range(40)} | {"big==2": 500, prepare.STANDARD_LIBRARY: 20}
    for share in (0.02, 0.1, 0.3):
        chosen = prepare.validation_packages(sizes, share)
        size = sum(sizes[package] for package in chosen)
        assert share * sum(sizes.values()) - 60 < size <= share * sum(sizes.values())
        assert not chosen & {"big==2", prepare.STANDARD_LIBRARY}
    renewed = {package.replace("==1", "==3"): size for package, size in sizes.items()}
    before = prepare.validation_packages(
        sizes, 0.1
    )  # another version of a package stays where that was
    assert prepare.validation_packages(renewed, 0.1) == {
        package.replace("==1", "==3") for package in before
    }


def test_it_goes_on_and_notices_another_environment(libraries, tmp_path):
    packages, _, _ = libraries
    corpus, _ = prepared(tmp_path, "--shard_tokens=3000")
    first = {file.name: file.read_bytes() for file in corpus.path.glob("*.bin")}
    assert len(first) > 3
    (corpus.path / "packages_train_000002.bin").unlink()
    again, _ = prepared(tmp_path, "--shard_tokens=3000")
    assert {file.name: file.read_bytes() for file in again.path.glob("*.bin")} == first
    install(packages, "later", "1.0", {"later/a.py": source(4)})
    options = [
        f"--out={tmp_path / 'out'}",
        "--val_share=0.2",
        "--vocab_size=300",
        "--shard_tokens=3000",
    ]
    line = one_line_error(call("research/residual_streams/python_packages.py", *options))
    assert "holds another preparation" in line
    assert "--overwrite" in line


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--val_share=0", "give a number above 0 to below 1"),
        ("--val_share=1", "give a number above 0 to below 1"),
        ("--val_share=0.0001", "has no packages for val"),
        ("--max_tokens=9", "unknown option --max_tokens"),
    ],
)
def test_mistakes_end_in_one_line(libraries, tmp_path, option, message):
    line = one_line_error(
        call("research/residual_streams/python_packages.py", option, f"--out={tmp_path / 'out'}")
    )
    assert message in line
    assert not (tmp_path / "out").exists()


def test_the_shards_are_those_of_earlier_code(libraries, tmp_path):
    out, libs = tmp_path / "out", libraries
    assert len(libs[2]) == 11
    options = ("--tokenizer=bytes", "--val_share=0.4", f"--out={out}")
    assert call("research/residual_streams/python_packages.py", *options).returncode == 0
    records = open_corpus(str(out)).meta["shards"]
    found = [record["sha256"][:16] for record in records]
    assert found == EARLIER
