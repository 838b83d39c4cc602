"""The page of a trained model: `python sample.py RUN --serve`.

    GET  /          the page (page.html, page.css, page.js: no framework, nothing from elsewhere)
    GET  /model     what the model is, what its writes say of each token, and the limits of a request
    POST /generate  a `Request` as JSON -> lines of JSON as they are made: the events of events.py

docs/serving.md describes them. A mistake is answered with {"message": one line}, within a stream
too. One generation runs at a time; it ends with its connection.
"""

import contextlib
import ipaddress
import itertools
import json
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

try:
    import uvicorn
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
    from pydantic import BaseModel, ConfigDict, Field
except ImportError as error:
    advice = "the page needs the fastapi and uvicorn packages: pip install fastapi uvicorn"
    raise ValueError(advice) from error

from data.tokenizer import encode_prompt
from model.generation import Sampling
from serving.events import declared, each_under, events
from serving.guard import EVERY_ADDRESS, Guard

FILES = {"/": "page.html"}
FILES |= {f"/{name}": name for name in ("page.css", "page.js", "heatmap.js", "icon.svg")}
MOST_NEW_TOKENS = 2048
LONGEST_PROMPT = 2**16  # characters
PATIENCE = 2.0  # seconds that a request waits for one that is being stopped

Stop = Annotated[str, Field(min_length=1, max_length=100)]


class Request(BaseModel):
    """The body of POST /generate; what is left out is as on the command line.

    Ranges of sampling are `Sampling`'s.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(max_length=LONGEST_PROMPT)] = ""
    max_new_tokens: Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)] = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop: Annotated[list[Stop], Field(max_length=8)] = []
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None  # JavaScript holds it exactly


class JSONLines(StreamingResponse):
    """A line for each event, as it comes. However it ends, the events are closed: so is their work."""

    def __init__(self, source):
        self.source = source
        lines = (json.dumps(event) + "\n" for event in source)
        super().__init__(lines, media_type="application/x-ndjson")

    async def __call__(self, scope, receive, send):
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.source.close()


def one_at_a_time(lock: threading.Lock, source):
    """The events of source while holding the lock, or one that says it is taken."""
    if not lock.acquire(timeout=PATIENCE):
        yield {"message": "busy: another text is being generated; try again when it has ended"}
        return
    try:
        yield from source
    finally:
        lock.release()


def one_line(error: Exception) -> str:
    """What is wrong with a request: `temperature=-1.0: give 0 or more`, or pydantic's complaint."""
    if not isinstance(error, RequestValidationError):
        return " ".join(str(error).split())
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return "the request is not JSON"
    if first["type"] == "model_attributes_type":
        fix = "send one, with the header content-type: application/json"
        return f"the request is no JSON object: {fix}"
    key = ".".join(str(part) for part in first["loc"] if part != "body") or "the request"
    return f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}"


def create_app(model, tokenizer, facts: dict, host="127.0.0.1", first_seed=0) -> FastAPI:
    """The application. Autocast stays as it is at this call.

    facts: of `facts_of`; host: what the server is bound to. Requests without a seed have
    first_seed, first_seed + 1, ..., as the samples of sample.py.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)  # those load from elsewhere
    app.add_middleware(Guard, host=host)
    app.state.closing = lambda: False
    device, longest = model.rope_cos.device.type, model.config.block_size
    enabled = torch.is_autocast_enabled(device)
    autocast = partial(torch.autocast, device, torch.get_autocast_dtype(device), enabled)
    lock, seeds = threading.Lock(), itertools.count(first_seed)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValueError)
    def mistake(_request, error):
        return JSONResponse({"message": one_line(error)}, status_code=400)

    @app.get("/model")
    def describe() -> dict:
        return facts

    @app.post("/generate")
    def generate(request: Request) -> JSONLines:
        asked = {**facts["defaults"], **request.model_dump(exclude_unset=True)}
        sampling = Sampling(**{name: asked[name] for name in Sampling.__dataclass_fields__})
        prompt = encode_prompt(tokenizer, request.prompt)
        if len(prompt) > longest:
            fix = f"give at most {longest}, end-of-text included"
            raise ValueError(f"the prompt has {len(prompt)} tokens: {fix}")
        seed = next(seeds) if request.seed is None else request.seed
        keys = prompt, asked["max_new_tokens"], sampling, seed, asked["stop"], app.state.closing
        return JSONLines(one_at_a_time(lock, each_under(autocast, events(model, tokenizer, *keys))))

    for path, name in FILES.items():
        file = Path(__file__).with_name(name)
        app.add_api_route(path, lambda file=file: FileResponse(file), methods=["GET"])
    return app


def facts_of(model, tokenizer, state: dict, defaults: dict) -> dict:
    """What GET /model says.

    state: of `load_model`, without a step for an exported folder; defaults: of a request.
    """
    return {
        "model": state["model"],
        "parameters": model.num_parameters(),
        "step": state.get("step"),
        "best_validation_loss": state.get("best_val_loss"),
        "tokenizer": tokenizer.name,
        "end_of_text": tokenizer.eot_token,
        "block_size": model.config.block_size,
        "statistics": declared(model),
        "most_new_tokens": MOST_NEW_TOKENS,
        "defaults": defaults,
    }


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. ValueError: the address is taken or not this machine's."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ValueError(f"--host={host} --port={port}: {error.strerror}; give others") from error


def serve(model, tokenizer, state: dict, args, sampling: Sampling) -> None:
    """Serve the page at args.host and args.port until Ctrl+C; sample.py's other options are what
    its fields start with.

    ValueError: the address cannot be had, or args.max_new_tokens is more than the page allows.
    """
    if args.max_new_tokens > MOST_NEW_TOKENS:
        fix = f"with --serve give at most {MOST_NEW_TOKENS}"
        raise ValueError(f"--max_new_tokens={args.max_new_tokens}: {fix}")
    defaults = {**vars(sampling), "max_new_tokens": args.max_new_tokens, "stop": args.stop}
    listening = listen(args.host, args.port)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a closed tab must not end the server
    address, port = listening.getsockname()[:2]
    host = address if address in EVERY_ADDRESS else args.host  # also of --host=0, or an empty one
    app = create_app(model, tokenizer, facts_of(model, tokenizer, state, defaults), host, args.seed)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    server = uvicorn.Server(settings)
    app.state.closing = lambda: server.should_exit
    print(f"http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl+C ends it)", flush=True)
    if not ipaddress.ip_address(address).is_loopback:
        note = "everyone who can reach this machine can use the page"
        if host in EVERY_ADDRESS:
            note += "; from elsewhere, open it by this machine's numeric address"
        print(f"note: {note}", file=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):  # which the server hands on when it has ended
        server.run(sockets=[listening])
