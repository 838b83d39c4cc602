"""The server of the page of a trained model: `python sample.py RUN --serve`.

    GET  /          the page (page.html, page.css and two scripts, without a framework; it loads
                    nothing from other sites)
    GET  /model     the model, the statistics of its residual stream, and the limits of a request
    POST /generate  a `Request` as JSON; the answer is lines of JSON, the events of events.py, each
                    sent as soon as it is computed

docs/serving.md documents them. An error is answered with {"message": one line}, also as an event.
One text is generated at a time, and its generation ends if the connection is closed.
"""

import contextlib
import ipaddress
import itertools
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

try:
    import uvicorn
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
    from pydantic import ConfigDict, Field, create_model
    from starlette.exceptions import HTTPException
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
from serving.guard import WILDCARD_ADDRESSES, Guard
from utils import errors

# the files of the page by their URL
FILES = {
    "/": "page.html",
    "/page.css": "page.css",
    "/page.js": "page.js",
    "/heatmap.js": "heatmap.js",
    "/icon.svg": "icon.svg",
}
MAX_NEW_TOKENS = 2048
MAX_PROMPT_CHARACTERS = 2**16
# How long a request waits for the one before it, which may be about to end, in seconds.
MAX_WAIT = 2.0

StopString = Annotated[str, Field(min_length=1, max_length=100)]


# The keys of `Sampling`, which checks their ranges itself.
SamplingKeys = create_model(
    "SamplingKeys", **{field.name: (field.type, field.default) for field in fields(Sampling)}
)


class Request(SamplingKeys):
    """The body of POST /generate; an omitted key has the value of the command line."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)] = ""

    # The server reads these and the keys of `Sampling` only if a request has them. Their defaults
    # never apply, but make them optional.
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] = 1
    stop: Annotated[list[StopString], Field(max_length=8, default_factory=list)]

    # None takes the next seed. JavaScript represents whole numbers exactly up to this limit.
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None


class JSONLines(StreamingResponse):
    """Sends each event as a line of JSON; then closes the iterator and releases the lock.

    This happens however the response ends, also before it begins.
    """

    def __init__(self, events: Generator[dict, None, None], lock: threading.Lock):
        self.events = events
        self.lock = lock
        lines = (json.dumps(event) + "\n" for event in events)
        super().__init__(lines, media_type="application/x-ndjson")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # ends the generation, also if the client has closed the connection
            try:
                self.events.close()
            finally:
                self.lock.release()


def report_mistake(events: Generator[dict, None, None]) -> Generator[dict, None, None]:
    """Yield events, and a message for an error, because the status can no longer say it."""
    with contextlib.closing(events):
        try:
            yield from events
        except ValueError as error:
            yield {"message": describe_mistake(error)}


def describe_mistake(error: Exception) -> str:
    """Return in one line what is wrong with a request, such as `temperature=-1.0: give 0 or more`.

    For an error that pydantic finds, it is pydantic's message after the key.
    """
    if not isinstance(error, RequestValidationError):
        return " ".join(str(error).split())
    keys = list(Request.model_fields)
    unknown = [str(each["loc"][-1]) for each in error.errors() if each["type"] == "extra_forbidden"]
    if unknown:
        hints = [f"unknown key {key}{errors.suggest(key, keys)}" for key in unknown]
        return f"{'; '.join(hints)}; the keys are {', '.join(keys)}"
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return "the request is not valid JSON"
    if first["type"] == "model_attributes_type":
        return (
            "the request is not a JSON object; send one, with the header content-type: "
            "application/json"
        )
    if first["type"] == "list_type":
        return 'stop: give a list of strings, such as ["\\n"]'
    key = ".".join(str(part) for part in first["loc"] if part != "body") or "the request"
    message = first["msg"]
    return f"{key}: {message[0].lower()}{message[1:]}"


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
    app.add_middleware(Guard, host=host)
    block_size = model.config.block_size
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

    @app.exception_handler(HTTPException)
    def answer_other_error(_request: object, error: HTTPException) -> JSONResponse:
        return JSONResponse({"message": error.detail}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValueError)
    def answer_mistake(_request: object, error: Exception) -> JSONResponse:
        return JSONResponse({"message": describe_mistake(error)}, status_code=400)

    @app.get("/model")
    def answer_model() -> dict:
        return description

    @app.post("/generate")
    def generate(request: Request) -> JSONLines:
        settings = {
            # lowest precedence first
            **description["defaults"],
            **request.model_dump(exclude_unset=True),
        }
        # errors are raised before the response begins, so that its status is 400
        sampling = Sampling(**{name: settings[name] for name in SamplingKeys.model_fields})
        prompt = encode_prompt(tokenizer, request.prompt)
        if len(prompt) > block_size:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens: give at most {block_size}, including "
                "end-of-text"
            )
        if not lock.acquire(timeout=MAX_WAIT):
            raise HTTPException(
                503,
                "busy: another text is being generated; try again when it has ended",
                {"Retry-After": f"{MAX_WAIT:.0f}"},
            )
        # the response releases the lock
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

    for url, name in FILES.items():
        answer = make_file_answer(Path(__file__).with_name(name))
        app.add_api_route(url, answer, methods=["GET"])
    return app


def make_file_answer(file: Path) -> Callable[[], FileResponse]:
    """Return a function that answers with a file.

    FastAPI lets a request set the parameters of such a function, also those with a default. So that
    no other file can be requested, this one has none.
    """
    return lambda: FileResponse(file)


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
        "weights": state.get("weights"),
        "best_validation_loss": state.get("best_val_loss"),
        "tokenizer": tokenizer.name,
        "end_of_text": tokenizer.eot_token,
        "block_size": model.config.block_size,
        "statistics": describe_statistics(model),
        "most_new_tokens": MAX_NEW_TOKENS,
        "defaults": defaults,
    }


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections.

    Raises:
        ValueError: the address is in use, or not an address of this machine
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ValueError(
            f"--host={host} --port={port}: {error.strerror}; give another host or port"
        ) from error


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
    defaults = {**vars(sampling), "max_new_tokens": max_new_tokens, "stop": stop}
    # listen before anything is computed, and report the port that --port=0 has chosen
    listening = listen(host, port)
    # sample.py ends at a closed pipe, but a closed tab must not end the server
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    address, port = listening.getsockname()[:2]
    # an empty host, or 0, is the wildcard address as well
    if address in WILDCARD_ADDRESSES:
        host = address
    server: uvicorn.Server | None = None
    app = create_app(
        model,
        tokenizer,
        describe_model(model, tokenizer, state, defaults),
        host=host,
        first_seed=first_seed,
        is_closing=lambda: server is not None and server.should_exit,
    )
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    )
    shown_host = f"[{host}]" if ":" in host else host
    print(f"http://{shown_host}:{port} (press Ctrl+C to stop the server)", flush=True)
    if not ipaddress.ip_address(address).is_loopback:
        note = "note: anyone who can reach this machine can use the page"
        if host in WILDCARD_ADDRESSES:
            note += "; from another machine, open it with the numeric address of this one"
        print(note, file=sys.stderr)
    # the server raises it again after it has shut down
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
