"""A user's text as tokens of a model, with what each of them shows."""

import torch

from data.tokenizer import encode_prompt
from sample import read_prompt
from serving.events import Pieces


def ids_of(argument: str, model, encoding) -> torch.Tensor:
    """--text, or FILE:path, or - for standard input, as ids (1, T) after end-of-text.

    ValueError: it is empty, longer than block_size, no UTF-8, or has tokens that the encoding does not know.
    """
    text = read_prompt(argument)
    if not text:
        raise ValueError("--text is empty: give a text, FILE:path, or - for standard input")
    ids, longest = encode_prompt(encoding, text), model.config.block_size
    if len(ids) > longest:
        raise ValueError(
            f"the text has {len(ids)} tokens: give at most block_size={longest}, end-of-text included"
        )
    return torch.tensor([ids], device=model.transformer.wte.weight.device)


def pieces_of(ids: torch.Tensor, encoding) -> list[dict]:
    """Of each token of ids (1, T): `text`, which joined are the whole, and `label`, the token by itself."""
    pieces = Pieces(encoding, [])
    found = [pieces.piece(token, None) for token in ids[0].tolist()]
    found[-1]["text"] += pieces.whole.end()
    return [{key: each[key] for key in ("text", "label")} for each in found]


def visible(label: str, most: int = 12) -> str:
    """A token in a table's cell: white space that is seen, at most `most` characters."""
    for space, sign in {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "·", "|": "\\|"}.items():
        label = label.replace(space, sign)
    label = "".join(
        c if c.isprintable() else f"\\x{ord(c):02x}" for c in label
    )  # some of them end a line
    return label if len(label) <= most else f"{label[: most - 1]}…"
