"""Run scripts of this repository against the hub that HF_ENDPOINT names, one after another.

Each line of the input is JSON, {"script": path, "arguments": [...]}, and is answered by a line
{"code": exit code, "out": text, "err": text}. Pauses are short, GPT-2's tokenizer is the byte
tokenizer, and no call finds files that an earlier one has cached.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import datasets
import huggingface_hub
from in_process import call

from data import documents, tokenizer

for kind in ("READ", "OPEN", "READ_SERVER_UNAVAILABLE"):
    setattr(datasets.config, f"STREAMING_{kind}_RETRY_INTERVAL", 0.1)
documents.BATCH_CHARACTERS = 3000
documents.HUB_SECONDS = 2
tokenizer.gpt2_tokenizer = tokenizer.byte_tokenizer

for line in sys.stdin:
    request = json.loads(line)
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    script = Path(request["script"]).relative_to(Path.cwd())
    result = call(str(script), *request["arguments"])
    response = {
        "code": result.returncode,
        "out": result.stdout.decode(),
        "err": result.stderr.decode(),
    }
    print(json.dumps(response), flush=True)
