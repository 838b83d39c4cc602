"""nanoGPT's Shakespeare, a token a character: the first 90% of the text for training, the rest for
validation.

    python data/shakespeare_char/prepare.py                        downloads the text, one megabyte
    python data/shakespeare_char/prepare.py --source=input.txt     a copy of it

The 65 characters of the text have the ids that nanoGPT gives them; the bytes that are not in it
follow, so that any prompt can be read. Before each of the two parts stands end-of-text.
"""

import hashlib
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import configurator
from data import preparation
from data.sources import Texts

ADDRESS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def whole_text(source: Path | None) -> str:
    """The text, of a file or downloaded. ValueError: it cannot be had, or is another."""
    try:
        if source:
            content = source.read_bytes()
        else:
            with urllib.request.urlopen(ADDRESS, timeout=30) as answer:
                content = answer.read()
    except OSError as error:
        cannot = f"{source or ADDRESS} cannot be read ({error})"
        raise ValueError(f"{cannot}: give --source=FILE, a copy of it") from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        another = f"is another text than nanoGPT's (SHA-256 {SHA256[:12]}...)"
        raise ValueError(f"{source or ADDRESS} {another}")
    return content.decode("ascii")


def main():
    fixed = {"tokenizer": "characters", "vocab_size": 257, "tokenizer_bytes": 2**21}
    parser = preparation.arguments(__doc__, Path(__file__).parent, {**fixed, "val_tokens": None})
    parser.add_argument("--source", type=Path, help="the text as a file, instead of a download")
    args = parser.parse_args()
    with configurator.one_line_errors():
        if args.verify:
            return preparation.prepare(args, "shakespeare_char", [])
        text = whole_text(args.source)
        cut = int(0.9 * len(text))
        parts = {"val": text[cut:], "train": text[:cut]}
        plan = [(split, Texts([part], "tiny Shakespeare"), None) for split, part in parts.items()]
        preparation.prepare(args, "shakespeare_char", plan)


if __name__ == "__main__":
    main()
