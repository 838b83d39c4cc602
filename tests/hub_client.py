"""Runs scripts of this repository against the hub that HF_ENDPOINT names, one after another in one process.

A line of JSON in, {"script": path, "arguments": [...]}; one out: {"code": exit code, "out": text, "err": text}. Pauses
and read-ahead are short; nothing is cached from one call to the next.
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

from data import hub, patience, sources

patience.FIRST_PAUSE, patience.LONGEST_PAUSE = 0.02, 0.3
hub.AHEAD, sources.ROWS = 1 << 16, 16


def call(script: str, arguments: list[str]) -> dict:
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
    huggingface_hub.HfFileSystem.clear_instance_cache()
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
