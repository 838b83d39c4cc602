"""The interface of every tokenizer of this repository."""

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import Literal

import numpy as np

# Which special tokens in a text are tokens: all of them, or none, so that they are plain text.
AllowedSpecial = Literal["all"] | Set[str]


class Tokenizer(ABC):
    """Encodes text as token ids, and decodes them.

    A subclass has the attributes

        name                what meta.json and messages call it
        n_vocab             highest id + 1; a few ids may be unused
        eot_token           id of the end-of-text token, which precedes every document unless
                            there is a beginning-of-text token
        bos_token, bos_text id and text of the token that precedes every document
        eot_text            text of the end-of-text token
        special_tokens_set  texts of all special tokens
        name_or_path        of a tokenizer of your own: its name in tokenizer_config.json, by which
                            exported folders and corpora with such a tokenizer are recognized
    """

    name: str
    n_vocab: int
    eot_token: int
    eot_text: str
    special_tokens_set: Set[str]
    name_or_path: str | None = None

    @property
    def bos_token(self) -> int:
        return self.eot_token

    @property
    def bos_text(self) -> str:
        return self.eot_text

    @abstractmethod
    def encode(self, text: str, *, allowed_special: AllowedSpecial = frozenset()) -> list[int]:
        """Return the ids of a text, to which no special token is added.

        Args:
            allowed_special: "all" reads special tokens in the text as such; by default they are
                plain text
        """

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32, with special tokens as plain text."""
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""

    @abstractmethod
    def decode_single_token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text, b"" for an unused id."""

    @abstractmethod
    def bytes_by_token(self) -> np.ndarray:
        """Return how many bytes of text each token stands for, int64 (n_vocab,).

        Special tokens, and ids that are not text, stand for none.
        """

    @abstractmethod
    def to_json(self) -> dict:
        """Return the description from which `data.tokenizer.from_json` rebuilds the tokenizer."""

    @abstractmethod
    def to_hugging_face(self) -> dict:
        """Return the tokenizer in the format of tokenizer.json of the `tokenizers` library.

        Raises:
            ValueError: that format cannot express it
        """
