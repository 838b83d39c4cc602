"""The page in chromium: what a person types, sees, points at and stops."""

import json
import time
import urllib.request

import browser
import pytest
import torch
from browser import COLUMN, RAMP, cells, color, point_at, text
from helpers import SMALL, small_run, wait_for
from in_process import call

from data.tokenizer import byte_tokenizer, train_byte_pairs
from model import build
from model.generation import Sampling
from serving import app
from training.model_folder import load_model

pytestmark = pytest.mark.skipif(
    browser.missing_program() is not None, reason=str(browser.missing_program())
)


@pytest.fixture(scope="module")
def address(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "page"
    assert call("train.py", *small_run(corpus, out, block_size=64, eval_full=False)).returncode == 0
    model, tokenizer, state = load_model(out, torch.device("cpu"))
    defaults = {**vars(Sampling(temperature=0.7, top_p=0.9)), "max_new_tokens": 30, "stop": []}
    with browser.serve_model(
        model, tokenizer, **app.describe_model(model, tokenizer, state, defaults)
    ) as address:
        yield address


@pytest.fixture(scope="module")
def chromium():
    with browser.browser() as driver:
        yield driver


@pytest.fixture
def page(chromium, address):
    chromium.get_log("browser")  # forget what was said before
    chromium.get(address)
    wait_for(lambda: "DDL-gpt-mha-rope" in text(chromium, "title"))
    yield chromium
    assert chromium.get_log("browser") == []


def content(page):
    """Return the text on the page, with its white space."""
    return page.execute_script("return text.textContent")


def format_number(value: float) -> str:
    """Return a number as the page writes it, with four digits."""
    return f"{float(f'{value:.4g}'):.10g}"


def tip_of(token, site, name="beta"):
    return f"{name} = {format_number(token['statistics'][name][site])}"


def fill(page, **fields):
    for name, value in fields.items():
        field = page.find_element("css selector", f"#{name}, [name={name}]")
        field.clear()
        field.send_keys(value)


def run(page, keys=None, **fields):
    """Fill in the fields, generate by the button or by keys, and wait for the end."""
    fill(page, **fields)
    if keys:
        page.find_element("id", "prompt").send_keys(*keys)
    else:
        page.find_element("id", "generate").click()
    wait_for(lambda: page.find_element("id", "generate").is_enabled())


def sent(address, **body):
    """Return the tokens that the server sends for the same request."""
    request = urllib.request.Request(f"{address}/generate", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as response:
        return [token for line in response for token in json.loads(line).get("tokens", ())]


def test_the_legend_names_what_a_gate_does(page):
    assert text(page, "lowest") == "0 keeps the state"
    assert text(page, "middle") == "1 replaces its component along k"
    assert text(page, "highest") == "2 reflects it"


def test_fields_start_as_on_the_command_line(page):
    values = {
        e.get_attribute("name"): e.get_attribute("value")
        for e in page.find_elements("css selector", "input")
    }
    expected = {
        "max_new_tokens": "30",
        "temperature": "0.7",
        "top_k": "",
        "top_p": "0.9",
        "min_p": "0",
    }
    assert values == {**expected, "repetition_penalty": "1", "seed": ""}
    for field in page.find_elements("css selector", "input, textarea"):
        assert field.accessible_name
    assert "step 6" in text(page, "facts").replace("\n", " ")


def test_text_streams_in_and_the_heat_map_shows_its_gates(page, address):
    page.execute_script(
        """window.states = [];
        new MutationObserver(() => states.push(text.textContent.length)).observe(text, { childList: true });"""
    )
    keys = {"max_new_tokens": 40, "temperature": 0.9, "top_k": 200, "top_p": 0.95, "seed": 3}
    run(page, prompt="def é():", **{name: str(value) for name, value in keys.items()})
    tokens = sent(address, prompt="def é():", **keys)
    assert content(page) == "".join(token["text"] for token in tokens)
    assert content(page).startswith("<|endoftext|>def é():")
    states = page.execute_script("return states")
    assert len(set(states)) > 2  # a busy machine hands over several tokens at once
    assert states == sorted(states)
    assert "tokens/s · seed 3" in text(page, "status")
    assert [e.text for e in page.find_elements("css selector", "#sites button")] == [
        "mean", "0 attn", "0 mlp", "1 attn", "1 mlp",
    ]  # fmt: skip
    time.sleep(0.2)  # a frame, in which it is drawn
    cell_colors = cells(page, len(tokens), 5)
    for token, column in zip(tokens, cell_colors):
        gates = token["statistics"]["beta"]
        for beta, cell in zip([sum(gates) / 4, *gates], column):
            assert cell == pytest.approx(color(beta), abs=1)
    assert len({tuple(cell) for column in cell_colors for cell in column[1:]}) > 20


@pytest.fixture
def generated_tokens(page, address) -> list[dict]:
    """Generate a text on the page, and return the tokens that the server sends for it."""
    run(page, prompt="ab", max_new_tokens="10", seed="1")
    return sent(address, prompt="ab", max_new_tokens=10, seed=1)


def test_pointing_at_a_cell_describes_it(page, generated_tokens):
    point_at(page, 4, 3)
    tip = text(page, "tip")
    assert tip_of(generated_tokens[4], 2) in tip
    assert "attention of block 1" in tip
    assert "token 4" in tip


def list_marked_tokens(page) -> list[str]:
    """Return the indices of the tokens that are marked in the text."""
    marked = page.find_elements("css selector", "#text .lit")
    return [element.get_attribute("data-token") for element in marked]


@pytest.mark.usefixtures("generated_tokens")
def test_pointing_at_a_cell_marks_its_token(page):
    point_at(page, 4, 3)
    assert list_marked_tokens(page) == ["4"]


@pytest.mark.usefixtures("generated_tokens")
def test_leaving_the_cells_hides_the_tip_and_the_mark(page):
    point_at(page, 4, 3)
    point_at(page, 30, 3)
    assert not page.find_element("id", "tip").is_displayed()
    assert list_marked_tokens(page) == []


def test_pointing_at_a_token_describes_it(page, generated_tokens):
    """The number is that of the row by which the text is colored."""
    from selenium.webdriver import ActionChains

    page.find_elements("css selector", "#sites button")[2].click()
    span = page.find_elements("css selector", "#text span")[1]
    ActionChains(page).move_to_element(span).perform()
    assert 'token 1 "a"' in text(page, "tip")
    assert tip_of(generated_tokens[1], 1) in text(page, "tip")


def get_tints(page) -> list[list[float]]:
    """Return the background color [r, g, b] of each token of the text."""
    tints = []
    for span in page.find_elements("css selector", "#text span"):
        rgba = span.value_of_css_property("background-color")
        tints.append(json.loads(rgba.replace("rgba(", "[").replace(")", "]"))[:3])
    return tints


def test_the_text_is_colored_by_the_mean_over_sublayers(page, generated_tokens):
    page.find_elements("css selector", "#sites button")[0].click()
    for token, tint in zip(generated_tokens, get_tints(page), strict=True):
        assert tint == pytest.approx(color(sum(token["statistics"]["beta"]) / 4), abs=1)


def test_the_text_is_colored_by_the_chosen_sublayer(page, generated_tokens):
    page.find_elements("css selector", "#sites button")[2].click()
    for token, tint in zip(generated_tokens, get_tints(page), strict=True):
        assert tint == pytest.approx(color(token["statistics"]["beta"][1]), abs=1)
    assert "colored by beta, MLP of block 0" in text(page, "text_title")


def test_the_last_sublayer_colors_the_text_at_first(page, generated_tokens):
    assert "colored by beta, MLP of block 1" in text(page, "text_title")
    gates = generated_tokens[1]["statistics"]["beta"]
    assert get_tints(page)[1] == pytest.approx(color(gates[-1]), abs=1)


def test_the_page_is_named_after_the_model(page):
    assert page.title.startswith("DDL-gpt-mha-rope")
    assert text(page, "title") == "DDL-gpt-mha-rope"


def test_an_error_is_in_view_on_a_phone(page):
    size = page.get_window_size()
    page.set_window_size(500, 500)
    try:
        run(page, prompt="ab", temperature="-1")
        top = page.execute_script("return error.getBoundingClientRect().bottom")
        assert 0 < top <= page.execute_script("return innerHeight")
    finally:
        page.set_window_size(size["width"], size["height"])
        page.get_log("browser")  # the answer 400 is expected


def test_keys(page, address):
    from selenium.webdriver.common.keys import Keys

    run(page, keys=[Keys.CONTROL, Keys.ENTER], prompt="ab", max_new_tokens="5", seed="1")
    tokens = sent(address, prompt="ab", max_new_tokens=5, seed=1)
    assert content(page) == "".join(token["text"] for token in tokens)
    canvas = page.find_element("id", "heatmap")
    canvas.send_keys(
        Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ARROW_DOWN
    )
    assert tip_of(tokens[1], 0) in text(page, "tip")
    canvas.send_keys(*[Keys.ARROW_RIGHT] * 20, *[Keys.ARROW_DOWN] * 20)
    assert tip_of(tokens[-1], 3) in text(page, "tip")


def test_stop_and_busy(chromium, monkeypatch):
    from selenium.webdriver.common.keys import Keys

    model = build("DDL-gpt-mha-rope", **SMALL)
    torch.nn.init.zeros_(model.ln_f.weight)  # the most likely token is always 0
    model.ln_f.register_forward_hook(lambda *_: time.sleep(0.03))  # 2000 tokens outlast a slow page
    with browser.serve_model(model, byte_tokenizer()) as address:
        chromium.get(address)
        for by_key in (False, True):
            wait_for(lambda: chromium.find_elements("css selector", "#sites button"))
            fill(chromium, prompt="ab", max_new_tokens="2000", temperature="0")
            chromium.find_element("id", "generate").click()
            wait_for(lambda: len(content(chromium)) > 30)
            assert not chromium.find_element("id", "generate").is_enabled()
            if by_key:
                chromium.find_element("id", "prompt").send_keys(Keys.ESCAPE)
            else:
                chromium.find_element("id", "stop").click()
            wait_for(lambda: text(chromium, "status").endswith("stopped"))
            stopped_text = content(chromium)
            time.sleep(0.2)
            assert content(chromium) == stopped_text
            num_generated = len(stopped_text) - len("<|endoftext|>ab")
            assert 0 < num_generated < 2000
            assert text(chromium, "status").startswith(f"{num_generated} tokens")
            run(chromium, max_new_tokens="3")
            assert text(chromium, "status").startswith("3 tokens")
        monkeypatch.setattr(app, "MAX_WAIT", 0.1)
        body = b'{"temperature": 0.0}'
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{address}/generate", body, headers)
        with urllib.request.urlopen(request, timeout=30) as other:
            other.readline()
            shown_text = content(chromium)
            run(chromium)
            assert text(chromium, "error").startswith("busy: another text is being generated")
            assert content(chromium) == shown_text


def test_stopping_before_the_first_token(chromium):
    model = build("DDL-gpt-mha-rope", **SMALL)
    model.ln_f.register_forward_hook(lambda *_: time.sleep(1))
    with browser.serve_model(model, byte_tokenizer()) as address:
        chromium.get(address)
        wait_for(lambda: chromium.find_elements("css selector", "#sites button"))
        fill(chromium, prompt="ab")
        chromium.find_element("id", "generate").click()
        assert text(chromium, "status") == "Processing the prompt…"
        chromium.find_element("id", "stop").click()
        wait_for(lambda: text(chromium, "status") != "Processing the prompt…")
        assert text(chromium, "status") == "stopped"


def test_mistakes_are_shown_and_go_away(page):
    for fields, message in (
        ({"temperature": "-1"}, "temperature=-1.0: give 0 or more"),
        ({"temperature": ""}, "temperature: input should be a valid number"),
        (
            {"prompt": "a<|im_start|>b"},
            "the prompt has the special token <|im_start|>, which the tokenizer bytes does not know",
        ),
        ({"prompt": "a" * 70}, "the prompt has 71 tokens: give at most 64"),
        ({"max_new_tokens": "99999"}, "max_new_tokens: input should be less than or equal to 2048"),
    ):
        fill(page, prompt="ab", temperature="1", max_new_tokens="4")
        run(page, **fields)
        assert text(page, "error").startswith(message)
        assert text(page, "status") == ""
    run(page, prompt="ab", temperature="1", max_new_tokens="4")
    assert not page.find_element("id", "error").is_displayed()
    logged = page.get_log("browser")
    assert all("/generate" in entry["message"] and "400" in entry["message"] for entry in logged)


def test_text_is_never_html(chromium):
    tag = "<img src=x onerror=window.bad=1>"
    encoding = train_byte_pairs([tag * 50], 260 + len(tag) - 4, pattern=r"[^>]*>|[^>]+")
    assert encoding.encode(tag + "&lt;")[1:] == list(b"&lt;")  # the tag is one token
    with browser.serve_model(
        build("DDL-gpt-mha-rope", **{**SMALL, "vocab_size": 300}), encoding
    ) as address:
        chromium.get(address)
        run(chromium, prompt=tag + "&lt;", max_new_tokens="3")
        assert content(chromium).startswith("<|endoftext|>" + tag + "&lt;")
        point_at(chromium, 1, 1)
        assert tag in text(chromium, "tip")
        run(chromium, prompt=f"<|{tag.replace(' ', '')}|>")
        assert (
            chromium.find_elements("css selector", "#text :not(span), #tip img, #error img") == []
        )
        assert chromium.execute_script("return window.bad") is None


def test_lines_may_come_in_parts(page, address):
    """An answer whose every 7 bytes arrive by themselves: parts of lines and of characters."""
    page.execute_script(
        """const whole = window.fetch;
        const transform = (bytes, to) => {
          for (let i = 0; i < bytes.length; i += 7) to.enqueue(bytes.slice(i, i + 7));
        };
        window.fetch = async (...request) =>
          new Response((await whole(...request)).body.pipeThrough(new TransformStream({ transform })));"""
    )
    run(page, prompt="日本 é", max_new_tokens="20", seed="1")
    tokens = sent(address, prompt="日本 é", max_new_tokens=20, seed=1)
    assert content(page) == "".join(token["text"] for token in tokens)


def test_a_narrow_dark_screen(page, address):
    size = {"width": 380, "height": 1400, "deviceScaleFactor": 1, "mobile": False}
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        # the most likely token is never the last
        run(page, prompt="ab", max_new_tokens="30", temperature="0")
        assert page.execute_script("return document.documentElement.scrollWidth") <= 380
        tokens = sent(address, prompt="ab", max_new_tokens=30, temperature=0.0)
        at, width = page.execute_script("return [scroller.scrollLeft, scroller.clientWidth]")
        # it has followed the newest token
        assert at + width == pytest.approx(COLUMN * len(tokens), abs=1)
        first = int(at // COLUMN) + 1  # that is seen whole
        left = COLUMN * first - int(at)
        time.sleep(0.2)
        cell_colors = cells(page, 5, 5, left)
        for token, column in zip(tokens[first:], cell_colors):
            for beta, cell in zip(token["statistics"]["beta"], column[1:]):
                assert cell == pytest.approx(color(beta), abs=1)
        point_at(page, 2, 4, left)
        assert f"token {first + 2} " in text(page, "tip")
        assert tip_of(tokens[first + 2], 3) in text(page, "tip")
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
        wait_for(lambda: cells(page, 2, 5, left) != cell_colors[:2])
    finally:
        page.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {**size, "width": 1280, "height": 1000}
        )
        page.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{**dark[0], "value": "light"}]}
        )


def test_another_statistic_is_chosen_and_colored_by_its_own_numbers(page, generated_tokens):
    names = [option.text for option in page.find_elements("css selector", "#statistic option")]
    assert names == ["beta", "discrepancy_before", "discrepancy_after"]
    page.find_elements("css selector", "#statistic option")[1].click()
    rows = [token["statistics"]["discrepancy_before"] for token in generated_tokens]
    rows = [[sum(row) / 4, *row] for row in rows]
    lowest = min(map(min, rows))
    highest = max(map(max, rows))
    assert text(page, "lowest") == format_number(lowest)
    time.sleep(0.2)
    for row, column in zip(rows, cells(page, len(generated_tokens), 5)):
        for value, cell in zip(row, column):
            assert cell == pytest.approx(color(value, RAMP, lowest, highest), abs=1.5)
    point_at(page, 4, 3)
    assert tip_of(generated_tokens[4], 2, "discrepancy_before") in text(page, "tip")


def test_a_model_without_statistics_says_so(chromium):
    with browser.serve_model(
        build("gpt-mha-rope", **SMALL), byte_tokenizer(), model="gpt-mha-rope"
    ) as address:
        chromium.get(address)
        wait_for(
            lambda: "gpt-mha-rope reports no statistics of its residual stream."
            in text(chromium, "no_statistics")
        )
        run(chromium, prompt="ab", max_new_tokens="3")
        assert content(chromium).startswith("<|endoftext|>ab")
        assert not chromium.find_element("id", "map").is_displayed()
        assert text(chromium, "tint_name") == ""
        assert text(chromium, "facts").split("\n") == [
            "parameters", "7,052", "tokenizer", "bytes", "context", "16",
        ]  # fmt: skip
        assert text(chromium, "title") == "gpt-mha-rope"
    run(chromium)
    assert text(chromium, "error") == "The server does not respond; see its terminal."
