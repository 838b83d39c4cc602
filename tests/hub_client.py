"""Runs scripts of this repository against the hub that HF_ENDPOINT names, one after another.

A line of JSON in, {"script": path, "arguments": [...]}; one out: {"code": exit code, "out": text,
"err": text}. Pauses are short, GPT-2's tokenizer is the byte tokenizer, and nothing is cached from
one call to the next.
"""

import contextlib
import io
import json
import os
import runpy
import shutil
import sys
import traceback

import huggingface_hub
import huggingface_hub.constants

from data import hub, sources, tokenizer

hub.FIRST_PAUSE, hub.LONGEST_PAUSE = 0.02, 0.3
sources.ROWS = 16


def call(script: str, arguments: list[str]) -> dict:
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    if "fineweb" in script:
        tokenizer.gpt2_tokenizer = tokenizer.byte_tokenizer
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__hub__")["main"]()
        except SystemExit as end:
            code = end.code
        except Exception:  # told to the test
            code = traceback.format_exc()
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(call(**json.loads(line))), flush=True)
