"""The server of the page: gates against uncached passes, texts against sample.py, and real HTTP."""

import contextlib
import http.client
import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import tiktoken
import torch
from helpers import SMALL, one_line_error, small_run
from in_process import call
from page_servers import serve_model, serve_run

from data.tokenizer import byte_tokenizer
from model import build
from model.generation import Sampling
from model.gpt import GPT, Stream
from model_folder import load_model
from serving import app as serving_app
from serving.completion import describe_statistics, generate_chunks
from training.residual_statistics import ObservedStream

DELTA = "DDL-vdim1-gpt-mha-rope"
GREEDY = Sampling(temperature=0)
TOKENIZER = byte_tokenizer()


def build_random_model(model_name: str, **changes) -> GPT:
    """Build a model in float64 that is far from its start, so that its gates differ by token."""
    model = build(model_name, **{**SMALL, **changes}).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


SITES = ["0 attn", "0 mlp", "1 attn", "1 mlp"]


BETA = {"beta": (0, 2), "discrepancy_before": None, "discrepancy_after": None}


@torch.no_grad()
def observe(model: GPT, ids: list[int]) -> dict[str, list[list[float]]]:
    """Return each token's statistics at all sites by name, from a pass without a cache."""
    columns = {}

    def on_write(site, write):
        for name, values in write.statistics.items():
            columns.setdefault(name, []).append(values[0].tolist())

    with model.through(ObservedStream(on_write)):
        model(torch.tensor([ids]))
    return {name: list(zip(*by_site)) for name, by_site in columns.items()}


@pytest.mark.parametrize(
    ("model_name", "expected_ranges"),
    [
        (DELTA, BETA),
        ("DDL-gpt-mha-rope-CC-EC", BETA),
        # a mean, which has no regimes
        (
            "MGT-gpt-mha",
            {"beta": None, "beta_variance": None, "beta_negative": (0, 1), "gate": (0, 1)},
        ),
        ("mHC-gpt-mha-rope", {"mix_kept": None, "mix_error": None}),
        ("gpt-mha-rope", {}),
    ],
)
def test_every_statistic_that_a_stream_names_is_shown(model_name, expected_ranges):
    """A statistic has its range, where it declares one. Only DDL's gates have regimes."""
    model = build_random_model(model_name)
    statistics = describe_statistics(model)
    assert {statistic["name"]: statistic["range"] for statistic in statistics} == expected_ranges
    gates = [statistic["name"] for statistic in statistics if statistic["gate"]]
    assert gates == [name for name in ("beta",) if expected_ranges.get(name) == (0, 2)]
    assert all(statistic["sites"] == SITES for statistic in statistics)
    chunks, tokens = generate_tokens(model, [256, 1, 2], 4)
    assert [token["prompt"] for token in tokens] == [True] * 3 + [False] * 4
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert chunks[-1]["usage"] == usage
    expected = observe(model, [token["id"] for token in tokens])
    for index, token in enumerate(tokens):
        assert token["statistics"].keys() == expected_ranges.keys()
        for name, numbers in token["statistics"].items():
            assert numbers == pytest.approx(expected[name][index], rel=1e-6, abs=1e-6), name


def test_a_block_that_occurs_twice_has_two_rows():
    model = build_random_model(DELTA)
    model.transformer.h[1] = model.transformer.h[0]
    assert describe_statistics(model)[0]["sites"] == ["0 attn", "0 mlp", "0 attn (2)", "0 mlp (2)"]
    _, tokens = generate_tokens(model, [256, 1, 2], 1)
    assert all(len(token["statistics"]["beta"]) == 4 for token in tokens)


def test_what_is_not_finite_is_sent_as_none():
    model = build_random_model(DELTA)
    write = model.transformer.h[1].ddl_mlp
    compute_statistics = write.statistics
    write.statistics = lambda *arguments: {
        name: values * float("nan") for name, values in compute_statistics(*arguments).items()
    }
    _, tokens = generate_tokens(model, [256, 1, 2], 0, sampling=GREEDY)
    assert [token["statistics"]["beta"][3] for token in tokens] == [None] * 3


def generate_tokens(
    model: GPT, prompt: list[int], count: int, tokenizer=TOKENIZER, **changes
) -> tuple[list[dict], list[dict]]:
    """Return the chunks of a completion, and all tokens in them."""
    options = {"sampling": Sampling(), "seed": 1, "stop": [], "is_cancelled": lambda: False}
    chunks = list(generate_chunks(model, tokenizer, prompt, count, **{**options, **changes}))
    return chunks, [token for chunk in chunks for token in chunk["tokens"]]


def test_past_block_size_each_gate_is_of_the_pass_that_made_the_tokens_logits():
    model = build_random_model(DELTA)
    _, tokens = generate_tokens(model, [256, 1, 2], 40, seed=2)
    assert len(tokens) == 43
    context = []
    for token in tokens:
        context.append(token["id"])
        if len(context) > 16:
            context = context[-8:]
        expected = observe(model, context)["beta"][-1]
        assert token["statistics"]["beta"] == pytest.approx(expected, abs=1e-6)


class Fused(Stream):
    def begin(self, model, x, cache):
        raise AssertionError("a fused stream has no writes to look at")


def test_fused_streams_step_aside_and_come_back():
    model = build(DELTA, **SMALL)
    fused = Fused()
    model.use_stream(fused)
    _, tokens = generate_tokens(model, [256, 1, 2], 1)
    assert tokens[0]["statistics"]["beta"]
    assert all(module.stream is fused for module in (model, *model.transformer.h))


# ---- text ----


def test_tokens_of_a_prompt_have_the_characters_that_they_complete():
    model = build(DELTA, **SMALL)
    _, tokens = generate_tokens(model, TOKENIZER.encode("aé"), 0)
    assert [token["text"] for token in tokens] == ["a", "", "é"]
    # what is no text by itself is labeled with its bytes
    assert [token["label"] for token in tokens] == ["a", "bytes c3", "bytes a9"]


@pytest.mark.parametrize(
    ("count", "is_cancelled", "reason", "num_tokens"),
    [(3, False, "length", 4), (30, True, "abort", 1)],
)
def test_a_text_ends_after_max_tokens_or_with_the_server(count, is_cancelled, reason, num_tokens):
    model = build(DELTA, **SMALL)
    chunks, tokens = generate_tokens(model, [256], count, is_cancelled=lambda: is_cancelled)
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    assert len(tokens) == num_tokens
    assert chunks[-1]["usage"]["total_tokens"] == num_tokens


def build_constant_model() -> GPT:
    """Build a model whose logits are all equal, so that greedy sampling takes token 0."""
    model = build(DELTA, **SMALL)
    torch.nn.init.zeros_(model.ln_f.weight)
    return model


SHIFTED = tiktoken.Encoding(
    "bytes after end of text",
    pat_str=r"[\s\S]",
    mergeable_ranks={bytes([value]): value + 1 for value in range(256)},
    special_tokens={"<|endoftext|>": 0},
)


@pytest.mark.parametrize(
    ("tokenizer", "stop", "ids", "text"),
    [(TOKENIZER, ["\0\0\0"], [1, 0, 0, 0], "\1"), (SHIFTED, [], [1], "\0")],
    ids=["stop string", "end of text"],
)
def test_a_text_ends_before_what_stops_it(tokenizer, stop, ids, text):
    chunks, tokens = generate_tokens(
        build_constant_model(), [1], 30, tokenizer, sampling=GREEDY, stop=stop
    )
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert [token["id"] for token in tokens] == ids
    assert "".join(token["text"] for token in tokens) == text


# ---- HTTP ----


class Response(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: str


def ask(address: str, method: str = "GET", path: str = "/", body=None, **headers) -> Response:
    """Send one request, and return the response."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    if isinstance(body, dict):
        body = json.dumps(body)
        headers = {"content-type": "application/json", **headers}
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return Response(response.status, response.headers, response.read().decode())


def complete(address, **body):
    """Return a completion, or the message that refuses it."""
    answer = json.loads(ask(address, "POST", "/v1/completions", body).body)
    return answer if "choices" in answer else answer["error"]["message"]


def stream(address, **body) -> list[dict]:
    """Return the chunks of a completion that is streamed."""
    response = ask(address, "POST", "/v1/completions", {**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end, _ = response.body.split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def open_stream(address: str, **body):
    """Return an open connection and its response."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    headers = {"content-type": "application/json"}
    content = json.dumps({**body, "stream": True})
    connection.request("POST", "/v1/completions", content, headers)
    return connection, connection.getresponse()


def text_of(completion: dict) -> str:
    return completion["choices"][0]["text"]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "served"
    assert call("train.py", *small_run(corpus, out, eval_full=False)).returncode == 0
    return out


@pytest.fixture(scope="module")
def address(run):
    options = ("--temperature=0.9", "--stop=qq", "--seed=5", "--max_new_tokens=25")
    with serve_run(run, *options) as (address, _):
        yield address


ROUTES = [
    ("GET", "/", {}, 200, "text/html"),
    ("GET", "/page.js", {}, 200, "javascript"),
    ("GET", "/page.css", {}, 200, "css"),
    ("GET", "/icon.svg", {}, 200, "svg"),
    ("GET", "/v1/models", {}, 200, "json"),
    # no other file, and no page of the framework, which would load files of other sites
    ("GET", "/app.py", {}, 404, "json"),
    ("GET", "/docs", {}, 404, "json"),
    ("GET", "/openapi.json", {}, 404, "json"),
    # another website may let its own name point at this machine
    ("GET", "/", {"host": "evil.example"}, 403, "json"),
    ("POST", "/v1/completions", {"host": "evil.example"}, 403, "json"),
    # a form of another website; a browser sends JSON only after a preflight, which is not answered
    ("POST", "/v1/completions", {"content-type": "text/plain"}, 400, "json"),
    ("OPTIONS", "/v1/completions", {}, 405, "json"),
]


@pytest.mark.parametrize(("method", "path", "headers", "status", "content_type"), ROUTES)
def test_only_the_page_and_its_interface_are_served(
    address, method, path, headers, status, content_type
):
    body = json.dumps({"prompt": "a", "max_tokens": 1}) if method == "POST" else None
    response = ask(address, method, path, body, **headers)
    assert response.status == status
    assert content_type in response.headers["content-type"]
    assert response.body
    assert "access-control-allow-origin" not in response.headers


def test_the_model_is_described_with_the_defaults_of_the_command_line(address):
    assert address.startswith("http://127.0.0.1:")  # others cannot reach it
    [description] = json.loads(ask(address, path="/v1/models").body)["data"]
    assert [statistic["sites"] for statistic in description.pop("statistics")] == [SITES] * 3
    defaults = {"temperature": 0.9, "top_k": None, "top_p": 0.9, "max_tokens": 25, "stop": ["qq"]}
    assert description == {
        "id": "DDL-gpt-mha-rope",
        "object": "model",
        "parameters": build("DDL-gpt-mha-rope", **SMALL).num_parameters(),
        "step": 6,
        "tokenizer": "bytes",
        "block_size": 16,
        "defaults": defaults,
    }


def test_the_text_is_that_of_the_command_line(address, run):
    settings = {"temperature": 1.3, "top_k": 200, "top_p": 0.95, "seed": 11}
    request = {**settings, "max_tokens": 30, "prompt": "def ü", "stop": ["z"]}
    completion = complete(address, **request)
    options = [f"--{key}={value}" for key, value in settings.items()]
    options += ["--max_new_tokens=30", "--prompt=def ü", "--stop=z"]
    printed = call("sample.py", run, *options).stdout.decode().removesuffix("\n")
    assert f"def ü{text_of(completion)}" == printed
    assert completion["seed"] == 11
    assert completion["model"] == "DDL-gpt-mha-rope"
    # a stream has the same text and tokens, in parts
    chunks = stream(address, **request)
    assert "".join(map(text_of, chunks)) == text_of(completion)
    assert [token for chunk in chunks for token in chunk["tokens"]] == completion["tokens"]
    assert "".join(token["text"] for token in chunks[0]["tokens"]) == "<|endoftext|>def ü"
    assert chunks[-1]["usage"] == completion["usage"]


def test_a_model_in_bfloat16_is_computed_in_it_in_every_thread(run):
    model, tokenizer, _ = load_model(run, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16), serve_model(model, tokenizer) as address:
        text = text_of(complete(address, prompt="def", max_tokens=30, seed=7, top_p=0.9))
    options = ("--prompt=def", "--dtype=bfloat16", "--max_new_tokens=30", "--seed=7")
    assert f"def{text}\n" == call("sample.py", run, *options).stdout.decode()


def test_what_is_left_out_is_as_on_the_command_line(address):
    first, second = (complete(address, prompt="a") for _ in range(2))
    assert second["seed"] == first["seed"] + 1
    assert first["seed"] >= 5
    assert first["usage"]["completion_tokens"] <= 25
    given = {"seed": first["seed"], "temperature": 0.9, "stop": "qq", "top_p": 0.9, "model": "any"}
    assert complete(address, prompt="a", **given) == first


MISTAKES = [
    ({"temperature": -1}, "temperature=-1.0: give a number at least 0"),
    ({"max_tokens": 2049}, "max_tokens: Input should be less than or equal to 2048"),
    ({"temprature": 1.0}, "temprature: Extra inputs are not permitted"),
    ({"prompt": "a<|im_start|>b"}, "the prompt has the special token <|im_start|>, which"),
    ({"prompt": "a" * 16}, "the prompt has 17 tokens: give at most 16"),
]


@pytest.mark.parametrize(("body", "message"), MISTAKES)
def test_a_mistake_is_answered_with_one_line(address, body, message):
    answer = complete(address, **body)
    assert isinstance(answer, str)
    assert answer.startswith(message)
    assert "\n" not in answer


@pytest.mark.parametrize(
    ("header", "bound_host", "expected"),
    [
        ("localhost:8000", "127.0.0.1", True),
        ("[::1]:8000", "::1", True),
        ("192.0.2.1", "0.0.0.0", True),
        ("Box.example:80", "box.example", True),
        (f"{socket.gethostname()}:8000", "0.0.0.0", True),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("evil.example:8000", "0.0.0.0", False),
        ("[::1", "::1", False),
        ("", "127.0.0.1", False),
    ],
)
def test_only_the_names_of_this_server_are_answered(header, bound_host, expected):
    assert serving_app.is_own_host(header, bound_host) is expected


class Slow:
    """A server in this process whose model takes 5 ms per pass, and always generates token 0."""

    def __init__(self):
        self.model = build_constant_model()
        self.passes = 0
        self.address = None
        self.model.ln_f.register_forward_hook(self.take_time)

    def take_time(self, *_):
        self.passes += 1
        time.sleep(0.005)

    def begin(self):
        """Return an open connection and its response, of which one event has been read."""
        connection, response = open_stream(self.address, prompt="a", temperature=0.0)
        assert response.readline().startswith(b'data: {"object": "text_completion"')
        return connection, response


@pytest.fixture
def slow():
    slow = Slow()
    with serve_model(slow.model, TOKENIZER) as slow.address:
        yield slow


def test_a_closed_connection_ends_the_computation(slow):
    connection, response = slow.begin()
    assert slow.passes < 2001  # text comes while it is made
    response.close()
    connection.close()
    # the next request waits until the model is free
    completion = complete(slow.address, prompt="a", temperature=0, max_tokens=100)
    assert completion["usage"]["completion_tokens"] == 100
    assert slow.passes < 2001
    assert type(slow.model.stream) is Stream


def test_logits_that_are_not_finite_end_a_text_with_a_message():
    model = build_random_model("gpt-mha-rope")
    torch.nn.init.constant_(model.ln_f.weight, float("nan"))
    with serve_model(model, TOKENIZER) as address:
        message = "the logits of the model are not finite; it may have diverged"
        # the server goes on
        assert complete(address, prompt="a", max_tokens=3) == message
        assert stream(address, prompt="a", max_tokens=3) == [{"error": {"message": message}}]


def test_one_generation_at_a_time(slow, monkeypatch):
    monkeypatch.setattr(serving_app, "MAX_WAIT", 0.1)
    connection, response = slow.begin()
    for _ in range(2):
        busy = ask(slow.address, "POST", "/v1/completions", {"max_tokens": 3})
        assert busy.status == 503
        assert json.loads(busy.body)["error"]["message"].startswith("busy:")
    assert response.readline() == b"\n"
    assert response.readline().startswith(b"data: ")  # the first goes on
    response.close()
    connection.close()


def test_interrupting_the_server_ends_a_stream(run):
    options = ("--host=::1", "--max_new_tokens=2000", "--temperature=0")
    with serve_run(run, *options) as (address, process):
        assert address.startswith("http://[::1]:")
        ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1]
        assert int(ignored, 16) >> (signal.SIGPIPE - 1) & 1  # a closed tab must not end the server
        _, response = open_stream(address)
        for _ in range(2):  # an event and an empty line
            response.readline()
        process.send_signal(signal.SIGINT)
        events = response.read().decode().split("\n\n")
        _, errors = process.communicate(timeout=60)
    assert events[-2] == "data: [DONE]"
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "abort"
    assert process.returncode == 0
    assert errors == ""


def test_an_address_that_cannot_be_had_ends_in_one_line(run):
    with socket.create_server(("127.0.0.1", 0)) as other_server:
        port = other_server.getsockname()[1]
        error = one_line_error(call("sample.py", run, "--serve", f"--port={port}"))
    assert f"--port={port}: Address already in use" in error
