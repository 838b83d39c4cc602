"""Prepare nanoGPT's character-level Shakespeare; the last 10% of the text is for validation.

    python data/shakespeare_char/prepare.py                         # downloads the text, 1 MB
    python data/shakespeare_char/prepare.py --source=input.txt      # reads a local copy

The 65 characters of the text have the same token ids as in nanoGPT. All other bytes have ids as
well, so that every prompt can be encoded. Each split begins with an end-of-text token.
"""

import hashlib
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from configurator import option
from data import documents, preparation
from data.preparation import PreparationOptions, Stage
from utils import errors

ADDRESS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def read_text(file: Path | None) -> str:
    """Return Shakespeare's text from a file, or download it if there is none.

    Raises:
        ValueError: the text cannot be read, or is not the one that nanoGPT has
    """
    try:
        if file is not None:
            content = file.read_bytes()
        else:
            with urllib.request.urlopen(ADDRESS, timeout=30) as response:
                content = response.read()
    except OSError as error:
        raise ValueError(
            f"{file or ADDRESS} cannot be read ({error}); give a local copy with --source=FILE"
        ) from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(
            f"{file or ADDRESS} is not nanoGPT's text, whose SHA-256 begins with {SHA256[:12]}; "
            f"give an unchanged copy of {ADDRESS} with --source=FILE"
        )
    return content.decode("ascii")


@dataclass(frozen=True)
class Options(PreparationOptions):
    """Options of tiny Shakespeare."""

    source: str | None = option(
        None,
        "file with a copy of the text (default: download it)",
    )


def main() -> None:
    args = preparation.read_options(
        __doc__,
        Path(__file__).parent,
        Options,
        fixed={
            "tokenizer": "characters",
            "vocab_size": 257,
            "tokenizer_bytes": 2**21,
            "val_tokens": None,
            "eot_token": None,
        },
    )
    with errors.one_line_errors():
        text = read_text(None if args.source is None else Path(args.source))
        train_length = int(0.9 * len(text))
        val = documents.from_texts([text[train_length:]], "tiny Shakespeare")
        train = documents.from_texts([text[:train_length]], "tiny Shakespeare")
        plan = [Stage("val", val, None), Stage("train", train, None)]
        preparation.prepare(args, "shakespeare_char", plan)


if __name__ == "__main__":
    main()
