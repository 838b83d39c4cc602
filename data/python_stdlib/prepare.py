"""The source text of the running interpreter's standard library as a small corpus. No network.

    python data/python_stdlib/prepare.py [--tokenizer=bpe|bytes|gpt2] [--vocab_size=4096] [--out=FOLDER]

Whole files, chosen by a hash of their names, are for validation: 4% of the bytes.
"""

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import configurator
from data import preparation
from data.sources import Texts

LEFT_OUT = set("site-packages dist-packages __pycache__ test tests idlelib lib2to3".split())
LEFT_OUT |= {"turtledemo", "ensurepip", "pydoc_data", "encodings"}
VALIDATION_SHARE = 0.04  # of the bytes, at least


def source_files(root: Path) -> dict[str, str]:
    """Text by relative path, in path order: every UTF-8 .py file below root, the folders left out
    and copies aside.
    """
    texts, seen = {}, set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, IsADirectoryError):
            continue
        if text.strip() and text not in seen:
            seen.add(text)
            texts[relative.as_posix()] = text
    return texts


def split_by_hash(texts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Files in the order of their path's hash: the first, up to the validation share of all bytes,
    are validation.
    """
    order = sorted(texts, key=lambda path: hashlib.sha256(path.encode()).digest())
    total = sum(len(text.encode()) for text in texts.values())
    splits, taken = {"val": {}, "train": {}}, 0
    for path in order:
        split = "val" if taken < VALIDATION_SHARE * total else "train"
        splits[split][path] = texts[path]
        taken += len(texts[path].encode())
    return splits


def main():
    fixed, here = {"val_tokens": None}, Path(__file__).parent
    args = preparation.arguments(__doc__, here, fixed, tokenizer="bpe").parse_args()
    with configurator.one_line_errors():
        root = Path(sysconfig.get_path("stdlib"))
        splits = split_by_hash(source_files(root))
        if not splits["train"]:
            lack = f"{root} holds no standard library source"
            raise ValueError(f"{lack}: run this with a full Python installation")
        name = f"standard library of Python {platform.python_version()}"
        plan = [(split, Texts(list(texts.values()), name), None) for split, texts in splits.items()]
        preparation.prepare(args, "python", plan)


if __name__ == "__main__":
    main()
