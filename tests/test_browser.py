"""The page of sample.py --serve in chromium: a user types, watches the gates, and stops."""

import json
import shutil
import time
import urllib.request

import pytest
import torch
from helpers import SMALL, wait_for
from page_servers import serve_model

from data.tokenizer import train_byte_pairs
from model import build
from model.causality import move_parameters

webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="apt-get install chromium chromium-driver",
)

TAG = "<img src=x onerror=window.bad=1>"
PROMPT = f"é {TAG}&lt;"
# Every 7 bytes of an answer arrive by themselves: parts of lines and of characters.
SPLIT_ANSWERS = """
const whole = window.fetch;
const transform = (bytes, to) => {
  for (let i = 0; i < bytes.length; i += 7) to.enqueue(bytes.slice(i, i + 7));
};
window.fetch = async (...request) =>
  new Response((await whole(...request)).body.pipeThrough(new TransformStream({ transform })));
window.lengths = [];
new MutationObserver(() => lengths.push(text.textContent.length)).observe(text, { childList: true });
"""

# of a gate of 0, 1 and 2
COLORS = [(33, 102, 172), (243, 243, 241), (178, 24, 43)]
# pixels of a cell of the heat map
COLUMN = 11
ROW = 14
LABELS = 60
READ_CELLS = """
const [tokens, rows] = arguments, context = heatmap.getContext("2d");
const color = (x, y) => [...context.getImageData(x, y, 1, 1).data.slice(0, 3)];
return [...Array(tokens).keys()].map((i) => [...Array(rows).keys()].map((j) => color(11 * i + 3, 60 + 14 * j + 6)));
"""
HAS_LABEL = """
const context = heatmap.getContext("2d");
const column = (i) => context.getImageData(11 * i, 0, 11, 58).data;
return [...Array(arguments[0]).keys()].map((i) => column(i).some((value) => value > 0));
"""


@pytest.fixture(scope="module")
def chromium():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for option in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1280,1000"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as driver:
        yield driver


@pytest.fixture(scope="module")
def address():
    """Serve a random DDL model, which takes 20 ms a token and to which TAG is one token."""
    tokenizer = train_byte_pairs([TAG * 50], 260 + len(TAG) - 4, pattern=r"[^>]*>|[^>]+")
    assert len(tokenizer.encode(TAG)) == 1
    torch.manual_seed(0)
    model = build("DDL-gpt-mha-rope", **{**SMALL, "vocab_size": 300, "block_size": 64})
    move_parameters(model).ln_f.register_forward_hook(lambda *_: time.sleep(0.02))
    with serve_model(model, tokenizer) as address:
        yield address


@pytest.fixture
def page(chromium, address):
    chromium.get_log("browser")  # forget what was said before
    chromium.get(address)
    wait_for(lambda: chromium.find_elements("css selector", "#site option"))
    yield chromium
    assert [each for each in chromium.get_log("browser") if each["level"] == "SEVERE"] == []


def shown(page, name: str) -> str:
    """Return the visible text of the element with an id."""
    return page.find_element("id", name).text


def content(page) -> str:
    """Return the prompt and the generated text, with their white space."""
    return page.execute_script("return text.textContent")


def fill(page, **fields: object) -> None:
    for name, value in fields.items():
        field = page.find_element("css selector", f"#{name}, [name={name}]")
        field.clear()
        field.send_keys(str(value))


def generate(page, **fields: object) -> None:
    """Fill in the fields, press the button, and wait for the end."""
    fill(page, **fields)
    button = page.find_element("id", "generate")
    button.click()
    wait_for(button.is_enabled)


def request_tokens(address: str, **body: object) -> list[dict]:
    """Return the tokens that the server sends for the same request."""
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["tokens"]


def color(gate: float) -> list[float]:
    """Return the color [r, g, b] of a gate on the linear scale between three colors."""
    low = min(int(gate), 1)
    return [a + (gate - low) * (b - a) for a, b in zip(COLORS[low], COLORS[low + 1])]


def point_at(page, token: int, row: int) -> None:
    """Move the pointer to a cell of the heat map."""
    canvas = page.find_element("id", "heatmap")
    # selenium counts from the middle of the element
    x = COLUMN * token + 3 - canvas.size["width"] // 2
    y = LABELS + ROW * row + 6 - canvas.size["height"] // 2
    webdriver.ActionChains(page).move_to_element_with_offset(canvas, x, y).perform()


def test_a_text_streams_in_with_its_gates_and_is_stopped(page, address):
    page.execute_script(SPLIT_ANSWERS)
    generate(page, prompt=PROMPT, max_tokens=20, seed=3)
    tokens = request_tokens(address, prompt=PROMPT, max_tokens=20, seed=3)
    assert content(page) == "".join(token["text"] for token in tokens)
    assert content(page).startswith(f"<|endoftext|>{PROMPT}")
    lengths = page.execute_script("return lengths")
    assert len(set(lengths)) > 2  # a busy machine hands over several tokens at once
    assert lengths == sorted(lengths)

    # a row for each of the four sublayers, and a label above each column
    assert shown(page, "sites").splitlines() == ["0 attn", "0 mlp", "1 attn", "1 mlp"]
    assert shown(page, "lowest") == "0 keeps the state"
    gates = [token["statistics"]["beta"] for token in tokens]
    time.sleep(0.2)  # a frame, in which it is drawn
    for rows, column in zip(gates, page.execute_script(READ_CELLS, len(tokens), 4)):
        for gate, cell in zip(rows, column):
            assert cell == pytest.approx(color(gate), abs=1)
    assert max(map(max, gates)) - min(map(min, gates)) > 0.5
    assert all(page.execute_script(HAS_LABEL, len(tokens)))

    # the text is colored by the chosen sublayer, and a cell is described by its number
    page.find_elements("css selector", "#site option")[2].click()
    time.sleep(0.2)
    for rows, span in zip(gates, page.find_elements("css selector", "#text span"), strict=True):
        rgba = json.loads(f"[{span.value_of_css_property('background-color')[5:-1]}]")
        assert rgba[:3] == pytest.approx(color(rows[1]), abs=1)
    tag = next(i for i, token in enumerate(tokens) if token["text"] == TAG)
    point_at(page, tag, 2)
    assert shown(page, "tip").startswith(f"beta = {float(f'{gates[tag][2]:.4g}'):.10g} at 1 attn")
    assert f"token {tag} " in shown(page, "tip")
    assert page.find_elements("css selector", "#text :not(span)") == []
    assert page.execute_script("return window.bad") is None

    # begun with Ctrl+Enter, and stopped with Esc
    fill(page, prompt="ab", max_tokens=2000)
    page.find_element("id", "prompt").send_keys(webdriver.Keys.CONTROL, webdriver.Keys.ENTER)
    wait_for(lambda: len(page.find_elements("css selector", "#text span")) > 10)
    page.find_element("id", "prompt").send_keys(webdriver.Keys.ESCAPE)
    wait_for(lambda: shown(page, "status").endswith("stopped"))
    stopped_text = content(page)
    time.sleep(0.2)
    assert content(page) == stopped_text
