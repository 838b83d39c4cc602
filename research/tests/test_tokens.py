"""The page of a text: its numbers against loops over tokens, and the page itself in chromium, opened as a file."""

import dataclasses
import json
import math
import re

import browser
import naive
import pytest
import torch
from browser import RAMP, cells, colour, point_at, text, until
from contract import randomise
from helpers import SMALL, one_line_error, small_run
from in_process import call

from data.tokenizer import byte_tokenizer
from model import STEMS, build
from research.analysis import texts, tokens

UNTRUSTED = "</script><script>window.bad=1</script>\n\t<img src=x onerror=window.bad=1>{{data}} &lt; 😀 é"
in_chromium = pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))


def ids_of(written: str) -> torch.Tensor:
    return torch.tensor([[256, *written.encode()]])


def by_hand(model, ids) -> dict:
    """{statistic: [site][token]} of a k-Map with one gate layer, from naive.py's loops, and the losses."""
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    found, T = {"beta": [], "discrepancy_before": [], "discrepancy_after": []}, ids.shape[1]

    def rewrite(w, X, h, x_in, c, cfg):
        k = h / (h @ h + cfg["ddl_k_eps"] ** 2).sqrt()
        value = cfg["ddl_v_sigmoid_scale"] * naive.sigmoid(w["v_proj.weight"] @ x_in + w["v_proj.bias"])
        written = naive.rewrite(w, X, h, x_in, c, cfg)
        found["beta"].append(2 * naive.sigmoid(w["beta.weight"][0] @ c + w["beta.bias"][0]).item())
        for name, state in (("discrepancy_before", X), ("discrepancy_after", written)):
            found[name].append(math.sqrt(sum((t - k @ x).item() ** 2 for t, x in zip(value, state.T)) / X.shape[1]))
        return written

    logits = naive.logits("DDL-gpt-mha-rope", weights, dataclasses.asdict(model.config), ids[0].tolist(), rewrite)
    losses = [-(scores.softmax(0)[goal].log()).item() for scores, goal in zip(logits, ids[0, 1:])]
    return {name: [each[i : i + T] for i in range(0, len(each), T)] for name, each in found.items()} | {"loss": losses}


def test_statistics_as_by_loops_over_tokens():
    model, ids = randomise(build("DDL-gpt-mha-rope", **SMALL)), ids_of("def é")
    wanted = by_hand(model, ids)
    found = {each["name"]: each for each in tokens.statistics_of(model, ids)}
    assert list(found) == ["beta", "discrepancy_before", "discrepancy_after", "loss"]
    assert [each["gate"] for each in found.values()] == [True, False, False, False]
    for name in ("beta", "discrepancy_before", "discrepancy_after"):
        sites, values = zip(*found[name]["rows"])
        assert sites == ("0 attn", "0 mlp", "1 attn", "1 mlp")
        for row, expected in zip(values, wanted[name]):
            assert row == pytest.approx(expected, rel=1e-3, abs=1e-4), name
    first, *losses = found["loss"]["rows"][0][1]
    assert first is None
    assert losses == pytest.approx(wanted["loss"], rel=1e-4)


@pytest.mark.parametrize("stem", STEMS)
def test_every_stream_has_a_page(stem):
    """With what its writes name, and the loss."""
    found = tokens.statistics_of(randomise(build(stem, **SMALL)), ids_of("abc"))
    assert found[-1]["name"] == "loss"
    assert all(len(row) == 4 for each in found for _, row in each["rows"])
    assert {each["name"] for each in found if each["gate"]} == ({"beta"} if stem.startswith("DDL") else set())
    page = tokens.page_of("a", {"model": stem}, texts.pieces_of(ids_of("abc"), byte_tokenizer()), found)
    assert "{{" not in page.partition("<script")[0]


def test_a_text_is_data_in_the_page():
    pieces = texts.pieces_of(ids_of(UNTRUSTED), byte_tokenizer())
    assert "".join(piece["text"] for piece in pieces) == "<|endoftext|>" + UNTRUSTED
    pieces = [{"text": "<|endoftext|>" + UNTRUSTED, "label": UNTRUSTED}]  # in one token, as no byte has it
    page = tokens.page_of("<b>", {}, pieces, [])
    assert "<title>&lt;b&gt;</title>" in page
    assert page.count("<script") == page.count("</script>") == 2
    held = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S)[1])
    assert "".join(each["text"] for each in held["tokens"]) == "<|endoftext|>" + UNTRUSTED
    assert "http" not in page.replace("http-equiv", "")


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "page"
    assert call("train.py", *small_run(corpus, out, block_size=128, eval_full=False)).returncode == 0
    return out


@pytest.fixture(scope="module")
def chromium():
    with browser.browser() as driver:
        yield driver


@pytest.fixture
def page(run, chromium, tmp_path):
    result = call(
        "research/analyze.py", "tokens", run, f"--text={UNTRUSTED}", f"--out={tmp_path / 'new' / 'page.html'}"
    )
    assert result.returncode == 0, result.stderr.decode()
    assert "beta, discrepancy_before, discrepancy_after, loss" in result.stdout.decode()
    chromium.get_log("browser")
    chromium.get((tmp_path / "new" / "page.html").as_uri())
    yield chromium
    assert chromium.execute_script("return window.bad") is None
    assert chromium.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert chromium.get_log("browser") == []


def held(page) -> dict:
    data = json.loads(page.execute_script("return document.getElementById('data').textContent"))
    return {each["name"]: each for each in data["statistics"]}


def choose(page, name: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(page.find_element("id", "statistic")).select_by_value(name)


def buttons(page):
    return page.find_elements("css selector", "#sites button")


@in_chromium
def test_cells_have_the_colours_of_the_numbers(page):
    assert page.execute_script("return text.textContent") == "<|endoftext|>" + UNTRUSTED
    assert page.find_elements("css selector", "#text :not(span), body img") == []
    statistics = held(page)
    for name, each in statistics.items():
        choose(page, name)
        rows = [row for _, row in each["rows"]]
        numbers = [value for row in rows for value in row if value is not None]
        scale = {} if name == "beta" else {"stops": RAMP, "lowest": min(numbers), "highest": max(numbers)}
        sites = ["mean", *(site for site, _ in each["rows"])] if len(rows) > 1 else ["model"]
        assert [button.text for button in buttons(page)] == sites
        means = [sum(column) / len(rows) if None not in column else None for column in zip(*rows)]
        columns = list(zip(means, *rows))[1:20] if len(rows) > 1 else list(zip(*rows))[1:20]

        def as_shown(columns=columns, scale=scale, sites=sites):
            shown = cells(page, len(columns), len(sites), left=14)
            pairs = [pair for column, cell in zip(columns, shown) for pair in zip(column, cell)]
            return all(cell == pytest.approx(colour(value, **scale), abs=1.5) for value, cell in pairs)

        until(as_shown)
        if name == "beta":
            assert [text(page, end) for end in ("lowest", "highest")] == ["0 keep", "2 reflect"]
        else:
            ends = [float(text(page, end)) for end in ("lowest", "highest")]
            assert ends == pytest.approx([min(numbers), max(numbers)], rel=1e-3)


@in_chromium
def test_selecting_pointing_and_keys(page):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    statistics = held(page)
    choose(page, "discrepancy_after")
    buttons(page)[3].click()
    assert text(page, "tint_name") == "tinted by discrepancy_after, the attn site of block 1"
    values = statistics["discrepancy_after"]["rows"][2][1]
    everything = [value for _, row in statistics["discrepancy_after"]["rows"] for value in row]
    spans = page.find_elements("css selector", "#text span")
    for index in (0, 7):
        found = json.loads(
            spans[index].value_of_css_property("background-color").replace("rgba(", "[").replace(")", "]")
        )
        assert found[:3] == pytest.approx(colour(values[index], RAMP, min(everything), max(everything)), abs=1.5)
    ActionChains(page).move_to_element(spans[3]).perform()
    assert f"discrepancy_after = {float(f'{values[3]:.4g}'):g}" in text(page, "tip")
    assert 'token 3 "s"' in text(page, "tip")
    loss = statistics["loss"]["rows"][0][1][3]
    assert text(page, "tip").endswith(f"loss {float(f'{loss:.4g}'):g}")
    point_at(page, 5, 2)
    assert "the mlp site of block 0" in text(page, "tip")
    assert [e.get_attribute("data-token") for e in page.find_elements("css selector", "#text .lit")] == ["5"]
    point_at(page, 5, 30)
    canvas = page.find_element("id", "heatmap")
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    first = statistics["discrepancy_after"]["rows"][0][1][1]
    assert f"discrepancy_after = {float(f'{first:.4g}'):g}" in text(page, "tip")
    choose(page, "loss")
    assert not page.find_element("id", "tip").is_displayed()
    assert text(page, "tint_name") == "tinted by the loss"
    assert spans[0].value_of_css_property("background-color") == "rgba(0, 0, 0, 0)"


@in_chromium
def test_a_narrow_dark_screen(page):
    size = {"width": 480, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    light = cells(page, 3, 5)
    try:
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
        until(lambda: cells(page, 3, 5) != light)
        assert page.execute_script("return document.documentElement.scrollWidth") <= 480
    finally:
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "width": 1280, "height": 1000})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{**dark[0], "value": "light"}]})


def test_mistakes_are_one_line(run, tmp_path):
    out = f"--out={tmp_path / 'page.html'}"
    for given, message in (
        (f"--text={'a' * 10_000}", "the text has 10001 tokens: give at most block_size=128, end-of-text included"),
        ("--text=", "--text is empty: give a text"),
        (f"--text=FILE:{tmp_path / 'none.txt'}", "No such file"),
        ("--text=a<|im_start|>", "<|im_start|>, which bytes does not know"),
    ):
        assert message in one_line_error(call("research/analyze.py", "tokens", run, given, out))
    assert "no checkpoint" in one_line_error(call("research/analyze.py", "tokens", tmp_path, "--text=a", out))
    assert list(tmp_path.iterdir()) == []
