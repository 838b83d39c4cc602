"""The server of the page of a trained model: `python sample.py RUN --serve`.

    GET  /          the page (serving/page/), which loads nothing from other sites
    GET  /model     the model, the statistics of its residual stream, and the defaults of a request
    POST /generate  a `Request` as JSON; the answer is lines of JSON, the events of events.py, each
                    sent as soon as it is computed

docs/serving.md documents them. An error is answered with {"message": one line}, also as an event.
One text is generated at a time, and its generation ends if the connection is closed.
"""

import contextlib
import itertools
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, StreamingResponse
    from fastapi.staticfiles import StaticFiles
    from pydantic import BaseModel, Field
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise ValueError(
        f"the page needs the fastapi and uvicorn packages, which cannot be imported ({error}): pip "
        "install fastapi uvicorn"
    ) from error

from data.tokenizer import Tokenizer, encode_prompt
from model.generation import Sampling
from model.gpt import GPT
from serving.events import describe_statistics, generate_events, iterate_under

MAX_NEW_TOKENS = 2048
# How long a request waits for the one before it, which may be about to end, in seconds.
MAX_WAIT = 2.0


class Request(BaseModel, extra="forbid", strict=True):
    """The body of POST /generate; an omitted key has the value of the command line.

    `Sampling` checks the ranges of its own keys.
    """

    prompt: Annotated[str, Field(max_length=2**16)] = ""
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=8)] = []

    # None takes the next seed. JavaScript represents whole numbers exactly up to this limit.
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None


class JSONLines(StreamingResponse):
    """Sends each event as a line of JSON; then closes the iterator and releases the lock.

    This happens however the response ends, also if the client has closed the connection.
    """

    def __init__(self, events: Iterator[dict], lock: threading.Lock):
        self.events = events
        self.lock = lock
        lines = (json.dumps(event) + "\n" for event in events)
        super().__init__(lines, media_type="application/x-ndjson")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.events.close()
            self.lock.release()


def report_mistake(events: Iterator[dict]) -> Iterator[dict]:
    """Yield events, and a message for an error, because the status can no longer say it."""
    with contextlib.closing(events):
        try:
            yield from events
        except ValueError as error:
            yield {"message": str(error)}


def list_own_names(host: str) -> list[str]:
    """Return the names in Host headers that the server answers to, without their ports.

    Any website can let its own name point at this machine (DNS rebinding), and so reach the server
    from the browser of a visitor. The header then has the name of the website.

    host: what the server listens on; 0.0.0.0 stands for all addresses of this machine
    """
    names = ["localhost", "127.0.0.1", host]
    if host in ("", "0.0.0.0"):
        name = socket.gethostname()
        names = ["localhost", "127.0.0.1", name]
        with contextlib.suppress(OSError):
            names += socket.gethostbyname_ex(name)[2]
    return names


def create_app(
    model: GPT,
    tokenizer: Tokenizer,
    description: dict,
    host: str = "127.0.0.1",
    first_seed: int = 0,
    is_closing: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """Return the application. It computes with the autocast that is active at this call.

    Args:
        description: as `describe_model` returns it
        host: what the server listens on
        first_seed: requests without a seed get first_seed, first_seed + 1, ..., as the samples of
            sample.py do
        is_closing: returns whether the server is shutting down, which ends a generation
    """
    # FastAPI's own documentation pages would load files from other sites
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list_own_names(host))
    # the autocast of this thread, to be entered by the threads that will compute
    device_type = model.rope_cos.device.type
    autocast = partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
    )
    # two generations at a time would slow each other down, and could exceed the memory
    lock = threading.Lock()
    seeds = itertools.count(first_seed)

    @app.exception_handler(RequestValidationError)
    def answer_invalid(_request: object, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][1:])
        return JSONResponse({"message": f"{key or 'the request'}: {first['msg']}"}, 400)

    @app.exception_handler(ValueError)
    def answer_mistake(_request: object, error: ValueError) -> JSONResponse:
        return JSONResponse({"message": str(error)}, 400)

    @app.exception_handler(HTTPException)
    def answer_other_error(_request: object, error: HTTPException) -> JSONResponse:
        return JSONResponse({"message": error.detail}, error.status_code, error.headers)

    @app.get("/model")
    def answer_model() -> dict:
        return description

    @app.post("/generate")
    def generate(request: Request) -> JSONLines:
        # errors are raised before the response begins, so that its status is 400
        settings = {**description["defaults"], **request.model_dump(exclude_unset=True)}
        sampling = Sampling(**{key: settings[key] for key in ("temperature", "top_k", "top_p")})
        prompt = encode_prompt(tokenizer, request.prompt)
        block_size = model.config.block_size
        if len(prompt) > block_size:
            raise ValueError(f"the prompt has {len(prompt)} tokens: give at most {block_size}")
        if not lock.acquire(timeout=MAX_WAIT):
            raise HTTPException(503, "busy: another text is being generated; try again later")
        events = generate_events(
            model,
            tokenizer,
            prompt,
            settings["max_new_tokens"],
            sampling=sampling,
            seed=next(seeds) if request.seed is None else request.seed,
            stop=settings["stop"],
            is_cancelled=is_closing,
        )
        return JSONLines(report_mistake(iterate_under(autocast, events)), lock)

    app.mount("/", StaticFiles(directory=Path(__file__).parent / "page", html=True))
    return app


def describe_model(model: GPT, tokenizer: Tokenizer, state: dict, defaults: dict) -> dict:
    """Return the answer to GET /model.

    Args:
        state: as `load_model` returns it; an exported folder has no step
        defaults: the values of keys that a request omits
    """
    return {
        "model": state["model"],
        "parameters": model.num_parameters(),
        "step": state.get("step"),
        "tokenizer": tokenizer.name,
        "block_size": model.config.block_size,
        "statistics": describe_statistics(model),
        "defaults": defaults,
    }


def serve(
    model: GPT,
    tokenizer: Tokenizer,
    state: dict,
    *,
    host: str,
    port: int,
    sampling: Sampling,
    max_new_tokens: int,
    stop: list[str],
    first_seed: int,
) -> None:
    """Serve the page until Ctrl+C.

    Args:
        state: as `load_model` returns it
        sampling, max_new_tokens, stop, first_seed: defaults of the form and of requests

    Raises:
        ValueError: the server cannot listen on host and port, or max_new_tokens is too large
    """
    if max_new_tokens > MAX_NEW_TOKENS:
        raise ValueError(
            f"--max_new_tokens={max_new_tokens}: give at most {MAX_NEW_TOKENS} with --serve"
        )
    # listen before anything is computed, and report the port that --port=0 has chosen
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise ValueError(
            f"--host={host} --port={port}: {error.strerror}; give another host or port"
        ) from error
    # sample.py ends at a closed pipe, but a closed tab must not end the server
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    defaults = {**vars(sampling), "max_new_tokens": max_new_tokens, "stop": stop}
    server: uvicorn.Server | None = None
    app = create_app(
        model,
        tokenizer,
        describe_model(model, tokenizer, state, defaults),
        host=host,
        first_seed=first_seed,
        is_closing=lambda: server is not None and server.should_exit,
    )
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False))
    address = f"http://{host}:{listening.getsockname()[1]}"
    print(f"{address} (press Ctrl+C to stop the server)", flush=True)
    # the server raises it again after it has shut down
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
