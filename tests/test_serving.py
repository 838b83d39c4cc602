"""The page's server: gates against uncached passes, text against plain decoding, and real HTTP."""

import contextlib
import http.client
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from argparse import Namespace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import tiktoken
import torch
from browser import local, served
from helpers import ROOT, SMALL, one_line_error, small_run
from in_process import call

from data.tokenizer import byte_tokenizer, train_byte_pairs
from model import STEMS, build
from model.decoding import round_matrices
from model.generation import Sampling
from model.gpt import Stream
from serving import app as serving_app
from serving.events import Pieces, declared, events
from serving.guard import host_fits
from training.checkpoint import load_model
from training.residual_statistics import ObservedStream

DELTA = [stem for stem in STEMS if stem.startswith("DDL")]
TOKENIZER = byte_tokenizer()


def lively(stem, **changes):
    """A model in float64 that is far from its start, so that gates differ from token to token."""
    model = build(stem, **{**SMALL, **changes}).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


SITES = ["0 attn", "0 mlp", "1 attn", "1 mlp"]


BETA = {"beta": (0, 2), "discrepancy_before": None, "discrepancy_after": None}
MGT = {"beta": None, "beta_variance": None, "beta_negative": (0, 1), "gate": (0, 1)}


@pytest.mark.parametrize(
    ("stem", "wanted"),
    [
        ("DDL-vdim1-gpt-mha-rope", BETA),
        ("MGT-gpt-mha", MGT),
        ("mHC-gpt-mha-rope", {"mix_kept": None, "mix_error": None}),
        ("AttnRes-gpt-mha-rope", {"embedding_weight": (0, 1), "effective_sources": None}),
        ("gpt-mha-rope", {}),
    ],
)
def test_every_statistic_that_a_stream_names_is_shown(stem, wanted):
    """With its range, where it declares one. DDL's gate alone has regimes, MGT's is a mean."""
    model = lively(stem)
    found = declared(model)
    assert {each["name"]: each["range"] for each in found} == wanted
    gates = [each["name"] for each in found if each["gate"]]
    assert gates == ["beta"] * stem.startswith("DDL")
    assert all(each["sites"] == SITES for each in found)
    _, tokens = generated(model, [256, 1, 2], 4)
    rows = {}

    def on_write(site, write):
        for name, values in write.statistics.items():
            rows.setdefault(name, []).append(values[0].tolist())

    with torch.no_grad(), model.through(ObservedStream(on_write)):
        model(torch.tensor([[token["id"] for token in tokens]]))
    for index, token in enumerate(tokens):
        assert token["statistics"].keys() == wanted.keys()
        for name, numbers in token["statistics"].items():
            own = [row[index] for row in rows[name]]
            assert numbers == pytest.approx(own, rel=1e-6, abs=1e-6), name


def test_a_block_that_occurs_twice_has_two_rows():
    model = lively("DDL-vdim1-gpt-mha-rope")
    model.transformer.h[1] = model.transformer.h[0]
    assert declared(model)[0]["sites"] == ["0 attn", "0 mlp", "0 attn (2)", "0 mlp (2)"]
    _, tokens = generated(model, [256, 1, 2], 1)
    assert all(len(token["statistics"]["beta"]) == 4 for token in tokens)


def test_what_is_not_finite_is_sent_as_none():
    model = lively("DDL-vdim1-gpt-mha-rope")
    torch.nn.init.constant_(model.transformer.h[1].ddl_mlp.beta.bias, float("nan"))
    _, tokens = generated(model, [256, 1, 2], 0)
    assert [token["statistics"]["beta"][3] for token in tokens] == [None] * 3


@torch.no_grad()
def uncached_gates(model, ids):
    """Every token's gates (T, sites) by the equation, from the sublayers' inputs of one pass."""
    contexts, blocks = [], model.transformer.h
    sublayers = [layer for block in blocks for layer in (block.attn, block.mlp)]
    note = lambda _, inputs: contexts.append(inputs[0][0])  # noqa: E731
    hooks = [layer.register_forward_pre_hook(note) for layer in sublayers]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    gates = []
    for c, write in zip(contexts, [w for block in blocks for w in (block.ddl_attn, block.ddl_mlp)]):
        if hasattr(write, "beta"):
            logit = c @ write.beta.weight[0] + write.beta.bias
        else:
            hidden = torch.tanh(c @ write.beta_in.weight.T)
            logit = hidden @ write.beta_out.weight[0] + write.beta_out.bias
        gates.append(2 / (1 + torch.exp(-logit)))
    return torch.stack(gates, dim=1)


def gates_of(tokens):
    return torch.tensor([token["statistics"]["beta"] for token in tokens])


def generated(model, prompt, count, tokenizer=TOKENIZER, **changes):
    keys = {"sampling": Sampling(), "seed": 1, "stop": [], "cancelled": lambda: False, **changes}
    seen = list(events(model, tokenizer, prompt, count, **keys))
    return seen, [token for event in seen for token in event.get("tokens", ())]


TWO_LAYERS = (DELTA[0], {"ddl_beta_single_linear": False})


@pytest.mark.parametrize(("stem", "changes"), [*((stem, {}) for stem in DELTA), TWO_LAYERS])
def test_gates_are_those_of_an_uncached_pass(stem, changes):
    model = lively(stem, **changes)
    prompt = [256, 3, 1, 4]
    seen, tokens = generated(model, prompt, 12)
    ids = [token["id"] for token in tokens]
    assert ids[:4] == prompt
    assert len(ids) == 16
    assert [token["prompt"] for token in tokens] == [True] * 4 + [False] * 12
    expected = uncached_gates(model, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(gates_of(tokens).double(), expected, rtol=0, atol=1e-6)
    assert seen[-1]["new_tokens"] == 12


def test_past_block_size_each_gate_is_of_the_pass_that_made_the_tokens_logits():
    model = lively(DELTA[0])
    _, tokens = generated(model, [256, 1, 2], 40, seed=2)
    assert len(tokens) == 43
    context = []
    for token in tokens:
        context.append(token["id"])
        if len(context) > 16:
            context = context[-8:]
        expected = uncached_gates(model, context)[-1].tolist()
        assert token["statistics"]["beta"] == pytest.approx(expected, abs=1e-6)


class Fused(Stream):
    def begin(self, model, x, cache):
        raise AssertionError("a fused stream has no writes to look at")


def test_fused_streams_step_aside_and_come_back():
    model, fused = build(DELTA[0], **SMALL), Fused()
    model.use_stream(fused)
    _, tokens = generated(model, [256, 1, 2], 1)
    assert all(module.stream is fused for module in (model, *model.transformer.h))
    model.use_stream(Stream())
    expected = uncached_gates(model, [token["id"] for token in tokens])
    torch.testing.assert_close(gates_of(tokens), expected)


# ---- text ----


def test_pieces_are_the_text_up_to_the_first_stop_string():
    """Random text of multi-byte characters, cut into tokens; against str.find on the whole."""
    draw = random.Random(0)
    alphabet = ["a", "b", "ab", "é", "日", "🙂", "\n"]
    encoding = train_byte_pairs(["".join(draw.choices(alphabet, k=2000))], 300)
    for _ in range(300):
        text = "".join(draw.choices(alphabet, k=draw.randint(0, 12)))
        lengths = [draw.randint(1, 3) for _ in range(draw.randint(0, 2))]
        stop = ["".join(draw.choices(alphabet, k=length)) for length in lengths]
        found = [text.find(s) for s in stop if s in text]
        expected, pieces, shown = text[: min(found)] if found else text, Pieces(encoding, stop), []
        ids = encoding.encode(text)
        for token in ids:
            shown += pieces.add(token, {})
            sofar = "".join(piece["text"] for piece in shown)
            assert expected.startswith(sofar)
            if not found or len(sofar) < len(expected):
                assert not any(stop in sofar for stop in stop)
            if pieces.stopped:
                break
        shown += pieces.end()
        assert "".join(piece["text"] for piece in shown) == expected
        assert [piece["id"] for piece in shown] == ids[: len(shown)]
        if not found:
            assert len(shown) == len(ids)


def test_half_a_character_at_the_end_and_bytes_that_are_none():
    pieces = Pieces(TOKENIZER, ["b"])
    shown = [pieces.add(token, {}) for token in (ord("a"), 0xC3, 0xA9, 0xC3)] + [pieces.end()]
    found = [[(piece["text"], piece["label"]) for piece in part] for part in shown]
    whole, half = [("", "bytes c3"), ("é", "bytes a9")], [("\ufffd", "bytes c3")]
    assert found == [[("a", "a")], [], whole, [], half]


def test_why_a_text_ends():
    model = build(DELTA[0], **SMALL)
    [_, _, *_, last], _ = generated(model, [256], 3)
    assert last["end"] == "all new tokens made"
    seen, tokens = generated(model, [256], 30, cancelled=lambda: True)
    assert seen[-1]["end"] == "the server ends"
    assert len(tokens) == 1
    torch.nn.init.zeros_(model.ln_f.weight)  # all logits equal: the likeliest token is 0
    seen, tokens = generated(model, [1], 30, sampling=Sampling(temperature=0), stop=["\0\0\0"])
    assert seen[-1]["end"] == "stop string"
    assert [token["text"] for token in tokens] == ["\1"]
    ends_at_0 = tiktoken.Encoding(
        "shifted", pat_str=r"[\s\S]", mergeable_ranks={bytes([v]): v + 1 for v in range(256)},
        special_tokens={"<|endoftext|>": 0},
    )  # fmt: skip
    seen, tokens = generated(model, [1], 30, ends_at_0, sampling=Sampling(temperature=0))
    assert (seen[-1]["end"], seen[-1]["new_tokens"]) == ("end of text", 0)
    assert [token["id"] for token in tokens] == [1]


# ---- HTTP ----


def ask(address, method="GET", path="/", body=None, **headers):
    """(status, headers, body) of one request."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    if isinstance(body, dict):
        body, headers = json.dumps(body), {"content-type": "application/json", **headers}
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()


def generate(address, **body):
    """The events of a generation, or the message that refuses it."""
    status, _, text = ask(address, "POST", "/generate", body)
    if status != 200:
        return json.loads(text)["message"]
    return [json.loads(line) for line in text.splitlines()]


def text_of(seen):
    return "".join(token["text"] for event in seen for token in event.get("tokens", ()))


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "served"
    assert call("train.py", *small_run(corpus, out, eval_full=False)).returncode == 0
    return out


@pytest.fixture(scope="module")
def address(run):
    options = ("--temperature=0.9", "--stop=qq", "--seed=5", "--max_new_tokens=25")
    with served(run, *options) as (address, process):
        yield address
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
        assert errors == ""


def test_the_page_and_the_model(address):
    assert address.startswith("http://127.0.0.1:")
    kinds = {"/": "text/html", "/page.js": "javascript", "/page.css": "css", "/icon.svg": "svg"}
    for path, kind in kinds.items():
        status, headers, body = ask(address, path=path)
        assert status == 200
        assert kind in headers["content-type"]
        assert body
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    for path in ("/app.py", "/docs", "/openapi.json", "/../sample.py", "/generate"):
        assert ask(address, path=path)[0] in (404, 405)
    facts = json.loads(ask(address, path="/model")[2])
    assert facts["model"] == "DDL-gpt-mha-rope"
    assert facts["step"] == 6
    assert facts["block_size"] == 16
    assert [each["sites"] for each in facts["statistics"]] == [SITES] * 3
    assert facts["parameters"] == build("DDL-gpt-mha-rope", **SMALL).num_parameters()
    assert facts["defaults"]["temperature"] == 0.9
    assert facts["defaults"]["stop"] == ["qq"]


def test_the_page_needs_nothing_from_elsewhere():
    for path in (ROOT / "serving").iterdir():
        if path.suffix in (".html", ".css", ".js", ".svg"):
            found = re.findall(r"(?:https?:)?//[\w.]+\.\w+", path.read_text(encoding="utf-8"))
            assert set(found) <= {"http://www.w3.org"}
            assert "innerHTML" not in path.read_text(encoding="utf-8")


def test_the_text_is_that_of_the_command_line(address, run):
    keys = {"max_new_tokens": 30, "temperature": 1.3, "top_k": 200, "top_p": 0.95, "min_p": 0.001}
    keys |= {"repetition_penalty": 1.2, "seed": 11}
    seen = generate(address, prompt="def ü", stop=["z"], **keys)
    options = [f"--{key}={value}" for key, value in keys.items()]
    printed = call("sample.py", run, "--prompt=def ü", "--stop=z", *options)
    assert text_of(seen).removeprefix("<|endoftext|>") == printed.stdout.decode().removesuffix("\n")
    assert seen[0] == {"seed": 11}
    assert generate(address, prompt="def ü", stop=["z"], **keys)[:-1] == seen[:-1]


def test_a_model_in_bfloat16_is_computed_in_it_in_every_thread(run):
    model, tokenizer, _ = load_model(run, torch.device("cpu"))
    round_matrices(model)
    with torch.autocast("cpu", torch.bfloat16), local(model, tokenizer) as address:
        text = text_of(generate(address, prompt="def", max_new_tokens=30, seed=7, top_p=0.9))
    options = ("--prompt=def", "--dtype=bfloat16", "--max_new_tokens=30", "--seed=7")
    printed = call("sample.py", run, *options)
    assert text.removeprefix("<|endoftext|>") == printed.stdout.decode().removesuffix("\n")


def test_what_is_left_out_is_as_on_the_command_line(address):
    first, second = (generate(address, prompt="a") for _ in range(2))
    assert second[0]["seed"] == first[0]["seed"] + 1
    assert first[0]["seed"] >= 5
    assert first[-1]["new_tokens"] <= 25
    said = {"seed": first[0]["seed"], "temperature": 0.9, "stop": ["qq"], "top_p": 0.9}
    again = generate(address, prompt="a", **said)
    assert again[:-1] == first[:-1]


MISTAKES = [
    ({"temperature": -1}, "temperature=-1.0: give 0 or more"),
    ({"temperature": float("nan")}, "temperature=nan: give 0 or more"),
    ({"top_p": 1.5}, "top_p=1.5: give a number above 0 and at most 1"),
    ({"top_k": 0}, "top_k=0: give 1 or more"),
    ({"max_new_tokens": 2049}, "max_new_tokens: input should be less than or equal to 2048"),
    ({"max_new_tokens": "5"}, "max_new_tokens: input should be a valid integer"),
    ({"stop": [""]}, "stop.0: string should have at least 1 character"),
    ({"temprature": 1.0}, "temprature: extra inputs are not permitted"),
    (
        {"prompt": "a<|im_start|>b"},
        "the prompt has the special token <|im_start|>, which the tokenizer bytes does not",
    ),
    ({"prompt": "a" * 16}, "the prompt has 17 tokens: give at most 16, end-of-text included"),
    ({"prompt": "a" * 600_000}, "a request of 586 KiB: give at most 512 KiB"),
]


@pytest.mark.parametrize(("body", "message"), MISTAKES)
def test_a_mistake_is_answered_with_one_line(address, body, message):
    answer = generate(address, **body)
    assert isinstance(answer, str)
    assert answer.startswith(message)
    assert "\n" not in answer


def test_requests_that_are_not_the_pages(address):
    port = urlsplit(address).port
    ok, here = {"prompt": "a", "max_new_tokens": 1}, f"localhost:{port}"

    def post(body=ok, **headers):
        return ask(address, "POST", "/generate", body, **headers)

    assert post(origin=address)[0] == 200
    assert post(host=here, origin=f"http://{here}")[0] == 200
    for headers in (
        {"host": "evil.example"},
        {"host": ""},
        {"host": "127.0.0.1.evil.example"},
        {"host": here, "origin": f"http://evil.example:{port}"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": f"http://127.0.0.1:{port + 1}"},
    ):
        status, answer_headers, body = post(**headers)
        assert status == 403, headers
        assert set(json.loads(body)) == {"message"}
        assert "content-security-policy" in answer_headers
    assert ask(address, host="evil.example")[0] == 403
    assert post(b"{", **{"content-type": "application/json"})[0] == 400
    assert post(json.dumps(ok), **{"content-type": "text/plain"})[0] == 400
    assert post(iter([b"{}"]))[0] == 411


def test_names_of_the_server():
    for header in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000"):
        assert host_fits(header, "127.0.0.1")
        assert host_fits(header, "10.1.2.3")
    assert host_fits("box.example:8000", "Box.example")
    assert host_fits("10.1.2.3:80", "10.1.2.3")
    assert host_fits("10.1.2.3:80", "0.0.0.0")
    assert host_fits("[fd00::1]:80", "::")
    for header in ("", "evil.example", "10.1.2.3", "localhost.evil.example"):
        assert not host_fits(header, "127.0.0.1")
    assert not host_fits("evil.example", "0.0.0.0")


class Slow:
    """A server here whose model takes 5 ms a pass, which `passes` counts; it says 0 always."""

    def __init__(self):
        self.model, self.passes, self.address = build(DELTA[0], **SMALL), 0, None
        torch.nn.init.zeros_(self.model.ln_f.weight)
        self.model.ln_f.register_forward_hook(self.take_time)

    def take_time(self, *_):
        self.passes += 1
        time.sleep(0.005)

    def settled(self):
        """The passes made, once there are no more of them."""
        for _ in range(100):
            before = self.passes
            time.sleep(0.1)
            if self.passes == before:
                return before
        raise AssertionError("it goes on")

    def begin(self):
        """An open connection on which text comes; its first two lines have been read."""
        connection = http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=30)
        body = json.dumps({"prompt": "a", "temperature": 0.0})
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert json.loads(response.readline()) == {"seed": 0}
        assert "tokens" in json.loads(response.readline())
        return connection, response


@pytest.fixture
def slow():
    slow = Slow()
    with local(slow.model, TOKENIZER) as slow.address:
        yield slow


def test_a_closed_connection_ends_the_computation(slow):
    connection, response = slow.begin()
    assert slow.passes < 2001  # text comes while it is made
    response.close()
    connection.close()
    assert slow.settled() < 2001
    assert type(slow.model.stream) is Stream
    last = generate(slow.address, prompt="a", temperature=0, max_new_tokens=100)[-1]
    assert last["new_tokens"] == 100


def test_one_generation_at_a_time(slow, monkeypatch):
    monkeypatch.setattr(serving_app, "PATIENCE", 0.1)
    connection, response = slow.begin()
    [answer] = generate(slow.address, max_new_tokens=3)
    assert answer["message"].startswith("busy:")
    assert "tokens" in json.loads(response.readline())  # the first goes on
    monkeypatch.setattr(serving_app, "PATIENCE", 10.0)
    waiting = []
    wait = lambda: waiting.extend(generate(slow.address, max_new_tokens=3))  # noqa: E731
    second = threading.Thread(target=wait)
    second.start()
    time.sleep(0.2)
    assert waiting == []
    response.close()
    connection.close()
    second.join(timeout=20)
    assert "end" in waiting[-1]


def test_interrupting_the_server_ends_a_stream(run):
    with served(run, "--max_new_tokens=2000", "--temperature=0") as (address, process):
        ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1]
        assert int(ignored, 16) >> (signal.SIGPIPE - 1) & 1  # a closed tab must not end the server
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
        connection.request("POST", "/generate", "{}", {"content-type": "application/json"})
        response = connection.getresponse()
        response.readline()
        process.send_signal(signal.SIGINT)
        lines = response.read().splitlines()
        _, errors = process.communicate(timeout=20)
    assert json.loads(lines[-1])["end"] == "the server ends"
    assert process.returncode == 0
    assert errors == ""


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_request_of_the_page_about_it_gets_the_answer_there(run):
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    command = re.search(r"```sh\n(.*?)```", page, flags=re.S)[1]
    lines = re.search(r"```json\n(.*?)```", page, flags=re.S)[1].splitlines()
    documented = [json.loads(line) for line in lines]
    model, tokenizer, _ = load_model(run, torch.device("cpu"))
    with local(model, tokenizer) as address:
        here = command.replace("http://127.0.0.1:8000", address)
        answer = subprocess.run(here, shell=True, capture_output=True, timeout=30, check=True)
        found = [json.loads(line) for line in answer.stdout.splitlines()]
        bare = here.replace("-H 'content-type: application/json'", "")
        plain = subprocess.run(bare, shell=True, capture_output=True, check=False)
    assert here != command
    tokens, wanted = (
        [t for e in each for t in e.get("tokens", [])] for each in (found, documented)
    )
    assert found[0] == documented[0] == {"seed": 0}
    assert all(token.keys() == wanted[0].keys() for token in [*tokens, *wanted])
    assert [token["prompt"] for token in tokens] == [True] * (1 + len("class")) + [False] * 2
    assert "".join(token["text"] for token in tokens if token["prompt"]) == "<|endoftext|>class"
    assert found[-1].keys() == documented[-1].keys()
    assert found[-1]["end"] == documented[-1]["end"]
    assert f"`{found[-1]['end']}`" in page
    message = json.loads(plain.stdout)["message"]
    assert message.endswith("with the header content-type: application/json")


def test_an_address_that_cannot_be_had_ends_in_one_line(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = one_line_error(call("sample.py", run, "--serve", f"--port={port}"))
    assert f"--port={port}: Address already in use" in error
    with pytest.raises(ValueError, match=r"--host=192\.0\.2\.1"):
        serving_app.listen("192.0.2.1", 0)
    with pytest.raises(ValueError, match="--max_new_tokens=5000: with --serve give at most 2048"):
        serving_app.serve(None, None, {}, Namespace(max_new_tokens=5000), Sampling())
