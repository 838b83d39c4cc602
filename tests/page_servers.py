"""Servers of the page of sample.py --serve."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from data.tokenizer import Tokenizer
from model.gpt import GPT

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def serve_run(run: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Start `sample.py RUN --serve` on a free port; yields its address and its process."""
    command = [sys.executable, "sample.py", run, "--serve", "--port=0", "--device=cpu", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        address = process.stdout.readline().split()
        if not address:
            raise RuntimeError(process.stderr.read())
        yield address[0], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@contextlib.contextmanager
def serve_model(model: GPT, tokenizer: Tokenizer) -> Iterator[str]:
    """Serve the page of a model in this process; yields its address."""
    import uvicorn

    from model.generation import Sampling
    from serving.app import create_app, describe_model

    defaults = {**vars(Sampling()), "max_tokens": 2000, "stop": []}
    description = describe_model(model, tokenizer, {"model": "a model"}, defaults)
    app = create_app(model, tokenizer, description)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
    assert not thread.is_alive()
