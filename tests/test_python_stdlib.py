"""The standard library corpus, on small trees whose text is known."""

import hashlib
import json
import platform

import numpy as np
import pytest

from data import tokenizer
from data.python_stdlib import prepare


@pytest.fixture
def tree(tmp_path):
    """Sources under a folder whose own path holds a name that is left out below it."""
    root = tmp_path / "test" / "lib"
    files = {"b.py": "b = 1\n", "a/z.py": "z = 'größe'\n", "a.py": "a = 1\n"}
    files |= {"test.py": "keep = 'a file, not a folder'\n", "a/copy_of_b.py": "b = 1\n"}
    files |= {"c_copy_of_b.py": "b = 1\n", "empty.py": "", "a/blank.py": " \n\t\n"}
    files |= {"a/notes.txt": "no source\n", "a/module.pyi": "x: int\n"}
    folders = "test a/tests site-packages dist-packages __pycache__ idlelib/deep lib2to3 turtledemo"
    folders = [*folders.split(), "ensurepip", "pydoc_data", "encodings"]
    files |= {f"{folder}/m.py": f"# {folder}\n" for folder in folders}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    (root / "latin.py").write_bytes("größe = 1\n".encode("latin-1"))
    (root.parent / "outside.py").write_text("outside = 1\n")
    return root


def test_source_files_leave_out_what_is_no_source_of_its_own(tree):
    # The first of several copies stays: a/copy_of_b.py comes before b.py.
    expected = {"a.py": "a = 1\n", "a/copy_of_b.py": "b = 1\n", "a/z.py": "z = 'größe'\n"}
    expected["test.py"] = "keep = 'a file, not a folder'\n"
    assert prepare.source_files(tree) == expected


def sources(count, seed=0):
    """Files of very different sizes; every third is mostly two-byte characters."""
    sizes = np.random.default_rng(seed).integers(10, 3000, count)
    texts = ["é" * size if i % 3 == 0 else "x" * size for i, size in enumerate(sizes.tolist())]
    return {f"pkg{i % 7}/module_{i}.py": text for i, text in enumerate(texts)}


def size(texts):
    return sum(len(text.encode()) for text in texts.values())


@pytest.mark.parametrize("seed", range(3))
def test_the_first_by_hash_are_validation_up_to_four_percent_of_the_bytes(seed):
    texts = sources(300, seed)
    splits = prepare.split_by_hash(texts)
    assert splits["val"] | splits["train"] == texts
    by_hash = sorted(texts, key=lambda path: hashlib.sha256(path.encode()).hexdigest())
    assert [*splits["val"], *splits["train"]] == by_hash
    last = len(list(splits["val"].values())[-1].encode())
    assert size(splits["val"]) >= 0.04 * size(texts) > size(splits["val"]) - last
    for name in ("a.py", "pkg3/zzz.py", "middle/m.py"):  # a new file moves few others
        after = prepare.split_by_hash({name: "y" * 2000, **texts})["val"]
        assert len((splits["val"].keys() ^ after.keys()) - {name}) <= 2


def run_main(monkeypatch, root, *arguments):
    monkeypatch.setattr("sysconfig.get_path", lambda name: {"stdlib": str(root)}[name])
    monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, arguments)])
    prepare.main()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_main_makes_shards_that_decode_to_the_sources(tree, tmp_path, monkeypatch, kind):
    (tree / "special.py").write_text("x = '<|endoftext|>'\n" * 9)
    out = tmp_path / "new" / "folder"
    run_main(monkeypatch, tree, f"--tokenizer={kind}", "--vocab_size=260", f"--out={out}")
    meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    about = {"bytes": ("bytes", 257, 256), "bpe": ("bpe260", 260, 259)}[kind]
    assert (meta["tokenizer"], meta["vocab_size"], meta["eot_token"]) == about
    assert meta["source"] == f"standard library of Python {platform.python_version()}"
    rebuilt = tokenizer.from_json(json.loads((out / "tokenizer.json").read_text(encoding="utf-8")))
    splits = prepare.split_by_hash(prepare.source_files(tree))
    assert len(splits["train"]) + len(splits["val"]) == 5
    for split, name in (("val", "python_val_000000.bin"), ("train", "python_train_000001.bin")):
        tokens = np.frombuffer((out / name).read_bytes()[1024:], dtype="<u2").tolist()
        assert tokens[0] == meta["eot_token"]
        documents = splits[split].values()
        # those spelled out in special.py are plain text
        assert tokens.count(meta["eot_token"]) == len(documents)
        assert rebuilt.decode(tokens) == "".join("<|endoftext|>" + text for text in documents)
        counts = {"documents": len(documents), "bytes": size(splits[split])}
        assert meta[split] == {**counts, "tokens": len(tokens)}
    assert len(list(out.iterdir())) == 5  # with meta.json, tokenizer.json and preparation.json


def test_main_without_sources_ends_in_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "lib").mkdir()
    with pytest.raises(SystemExit) as end:
        run_main(monkeypatch, tmp_path / "lib", f"--out={tmp_path / 'out'}")
    assert end.value.code == 2
    assert "holds no standard library source" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
