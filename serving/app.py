"""The server of the page of a trained model: `python sample.py RUN --serve`.

    GET  /                the page (serving/page/), which loads nothing from other sites
    GET  /v1/models       the model, the statistics of its residual stream, and the defaults of a request
    POST /v1/completions  a `Request` as JSON; the answer has the form of OpenAI's API: JSON, or, with
                          "stream": true, an event for each token, sent as soon as it is computed

docs/serving.md documents them. An error is answered with {"error": {"message": one line}}, also as an
event. One text is generated at a time, and a stream ends if the connection is closed.
"""

import contextlib
import ipaddress
import itertools
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import torch

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from fastapi.staticfiles import StaticFiles
    from pydantic import BaseModel, Field
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise ValueError(
        f"the page needs the fastapi and uvicorn packages, which cannot be imported ({error}): pip "
        "install -r requirements-page.txt"
    ) from error

from data.tokenizer import Tokenizer, encode_prompt
from model.generation import Sampling
from model.gpt import GPT
from serving.completion import describe_statistics, generate_chunks, iterate_under, join_chunks

MAX_NEW_TOKENS = 2048
# How long a request waits for the one before it, which may be about to end, in seconds.
MAX_WAIT = 2.0

StopString = Annotated[str, Field(min_length=1)]


class Request(BaseModel, extra="forbid", strict=True):
    """The body of POST /v1/completions; an omitted key has the value of the command line.

    `Sampling` checks the ranges of its own keys.
    """

    prompt: Annotated[str, Field(max_length=2**16)] = ""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: StopString | Annotated[list[StopString], Field(max_length=8)] | None = None

    # None takes the next seed. JavaScript represents whole numbers exactly up to this limit.
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None

    stream: bool = False
    model: str = ""  # OpenAI's clients name one; there is only one here


class EventStream(StreamingResponse):
    """Sends each chunk as a server-sent event; then closes the iterator and releases the lock.

    This happens however the response ends, also if the client has closed the connection.
    """

    def __init__(self, chunks: Iterator[dict], lock: threading.Lock):
        self.chunks = chunks
        self.lock = lock
        events = itertools.chain(map(json.dumps, chunks), ["[DONE]"])
        lines = (f"data: {event}\n\n" for event in events)
        super().__init__(lines, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.chunks.close()
            self.lock.release()


def make_error(message: str) -> dict:
    """Return the body of an answer to a mistake."""
    return {"error": {"message": message}}


def report_mistake(chunks: Iterator[dict]) -> Iterator[dict]:
    """Yield chunks, and a message for an error, because the status can no longer say it."""
    with contextlib.closing(chunks):
        try:
            yield from chunks
        except ValueError as error:
            yield make_error(str(error))


def is_own_host(header: str, bound_host: str) -> bool:
    """Return whether a Host header names this server.

    Any website can let its own name point at this machine (DNS rebinding), and so reach the server
    from the browser of a visitor. The header then has the name of the website. This cannot happen
    with a numeric address.

    bound_host: what the server listens on
    """
    with contextlib.suppress(ValueError):  # not a valid header, or not a numeric address
        name = urlsplit(f"//{header}").hostname or ""
        own_names = {"localhost", bound_host.lower(), socket.gethostname().lower()}
        return name in own_names or bool(ipaddress.ip_address(name))
    return False


class OwnHostOnly:
    """ASGI middleware that refuses requests whose Host header does not name this server.

    Args:
        host: what the server listens on
    """

    def __init__(self, app: ASGIApp, host: str):
        self.app = app
        self.host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            header = Headers(scope=scope).get("host", "")
            if not is_own_host(header, self.host):
                message = f"this server does not answer to the name {header!r}"
                app = JSONResponse(make_error(message), 403)
        await app(scope, receive, send)


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
    app.add_middleware(OwnHostOnly, host=host)
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
        key = next((part for part in first["loc"][1:] if isinstance(part, str)), "the request")
        return JSONResponse(make_error(f"{key}: {first['msg']}"), 400)

    @app.exception_handler(ValueError)
    def answer_mistake(_request: object, error: ValueError) -> JSONResponse:
        return JSONResponse(make_error(str(error)), 400)

    @app.exception_handler(HTTPException)
    def answer_other_error(_request: object, error: HTTPException) -> JSONResponse:
        return JSONResponse(make_error(error.detail), error.status_code, error.headers)

    @app.get("/v1/models")
    def list_models() -> dict:
        return {"object": "list", "data": [description]}

    @app.post("/v1/completions", response_model=None)
    def complete(request: Request) -> Response | dict:
        # errors are raised before the response begins, so that its status is 400
        settings = {**description["defaults"], **request.model_dump(exclude_unset=True)}
        sampling = Sampling(**{key: settings[key] for key in ("temperature", "top_k", "top_p")})
        prompt = encode_prompt(tokenizer, request.prompt)
        block_size = model.config.block_size
        if len(prompt) > block_size:
            raise ValueError(f"the prompt has {len(prompt)} tokens: give at most {block_size}")
        stop = settings["stop"] or []
        if not lock.acquire(timeout=MAX_WAIT):
            raise HTTPException(503, "busy: another text is being generated; try again later")
        chunks = generate_chunks(
            model,
            tokenizer,
            prompt,
            settings["max_tokens"],
            sampling=sampling,
            seed=next(seeds) if request.seed is None else request.seed,
            stop=[stop] if isinstance(stop, str) else stop,
            is_cancelled=is_closing,
        )
        chunks = iterate_under(autocast, chunks)
        if request.stream:
            return EventStream(report_mistake(chunks), lock)
        try:
            return {"model": description["id"], **join_chunks(chunks)}
        finally:
            lock.release()

    app.mount("/", StaticFiles(directory=Path(__file__).parent / "page", html=True))
    return app


def describe_model(model: GPT, tokenizer: Tokenizer, state: dict, defaults: dict) -> dict:
    """Return the entry of GET /v1/models.

    Args:
        state: as `load_model` returns it; an exported folder has no step
        defaults: the values of keys that a request omits
    """
    return {
        "id": state["model"],
        "object": "model",
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
    is_ipv6 = ":" in host
    try:
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(
            f"--host={host} --port={port}: {error.strerror}; give another host or port"
        ) from error
    # sample.py ends at a closed pipe, but a closed tab must not end the server
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    defaults = {**vars(sampling), "max_tokens": max_new_tokens, "stop": stop}
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
    shown_host = f"[{host}]" if is_ipv6 else host
    address = f"http://{shown_host}:{listening.getsockname()[1]}"
    print(f"{address} (press Ctrl+C to stop the server)", flush=True)
    # the server raises it again after it has shut down
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
