"""Tokens that are ids: those of synthetic tasks. Their text is numbers with blanks between."""

from dataclasses import dataclass

import numpy as np

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class IdTokenizer:
    """The part of tiktoken.Encoding that is used here: ids 0 to n_vocab - 2, then end-of-text."""

    n_vocab: int

    name = "ids"
    special_tokens_set = frozenset({END_OF_TEXT})

    @property
    def eot_token(self) -> int:
        return self.n_vocab - 1

    def encode(self, text: str, **_) -> list[int]:
        """Ids of numbers, end-of-text by its name. ValueError: something else, or no such id."""
        found = []
        for word in text.split():
            is_id = word.isascii() and word.isdecimal() and int(word) < self.eot_token
            if not is_id and word != END_OF_TEXT:
                give = f"give numbers from 0 to {self.n_vocab - 2} with blanks between"
                raise ValueError(f"{word[:40]!r} is no token: they are ids here, {give}")
            found.append(int(word) if is_id else self.eot_token)
        return found

    def encode_to_numpy(self, text: str, **_) -> np.ndarray:
        """Ids of numbers alone, as a prepare.py writes them, uint32."""
        return np.array(text.split(), dtype=np.uint32)

    def decode(self, tokens: list[int]) -> str:
        return b"".join(map(self.decode_single_token_bytes, tokens)).decode().strip()

    def decode_single_token_bytes(self, token: int) -> bytes:
        """With the blank before it, so that tokens can be joined."""
        return f" {END_OF_TEXT if token == self.eot_token else token}".encode()
