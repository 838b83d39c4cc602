"""Runs scripts of this repository against the hub that HF_ENDPOINT names, one after another.

A line of JSON in, {"script": path, "arguments": [...]}; one out: {"code": exit code, "out": text,
"err": text}. Pauses are short, GPT-2's tokenizer is the byte tokenizer, and nothing is cached from
one call to the next.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import huggingface_hub
from in_process import call

from data import hub, sources, tokenizer

hub.FIRST_PAUSE, hub.MAX_PAUSE = 0.02, 0.3
sources.ROWS = 16
tokenizer.gpt2_tokenizer = tokenizer.byte_tokenizer

for line in sys.stdin:
    asked = json.loads(line)
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    script = Path(asked["script"]).relative_to(Path.cwd())
    found = call(str(script), *asked["arguments"])
    texts = {"out": found.stdout.decode(), "err": found.stderr.decode()}
    print(json.dumps({"code": found.returncode, **texts}), flush=True)
