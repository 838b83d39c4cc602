"""The page of sample.py --serve in chromium without a window, and servers for it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.tokenizer import Tokenizer
from model.gpt import GPT

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

ROOT = Path(__file__).parents[1]
CHROMIUM_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
)

# Pixels of the heat map: the width of a token's column, the height of a site's row, and that of the
# labels above the rows.
COLUMN = 14
ROW = 20
LABELS = 64
# color scales of the page: of any statistic, and of a gate from 0 to 2
RAMP = ["#f3f3f1", "#d5e3d0", "#9cc7b0", "#4a9a8c", "#14595f"]
LIGHT = ["#2166ac", "#92c5de", "#f3f3f1", "#f4a582", "#b2182b"]


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
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@contextlib.contextmanager
def serve_model(model: GPT, tokenizer: Tokenizer, /, **changes) -> Iterator[str]:
    """Serve the page of a model in this process; yields its address.

    changes: entries of the answer to GET /model that replace the model's own
    """
    import uvicorn

    from model.generation import Sampling
    from serving.app import create_app, describe_model, listen

    defaults = {**vars(Sampling()), "max_new_tokens": 2000, "stop": []}
    description = describe_model(model, tokenizer, {"model": "a model"}, defaults)
    app = create_app(model, tokenizer, {**description, **changes})
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
    assert not thread.is_alive()


def missing_program() -> str | None:
    """Say which program of a browser is not installed, and how to install it; None if all are."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed (apt-get install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install selenium)"
    return None


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 1000, dark: bool = False) -> Iterator["WebDriver"]:
    """Start a chromium; yields its selenium driver, which records its console.

    `driver.get_log("browser")` returns the console.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for option in (*CHROMIUM_OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


def text(page: "WebDriver", name: str) -> str:
    """Return the visible text of the element with an id."""
    return page.find_element("id", name).text


def color(
    value: float, stops: Sequence[str] = LIGHT, lowest: float = 0.0, highest: float = 2.0
) -> list[float]:
    """Return the color [r, g, b] of a number on the linear scale between five stops."""
    rgb = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops]
    position = 4 * (value - lowest) / (highest - lowest)
    low = min(int(position), 3)
    return [a + (position - low) * (b - a) for a, b in zip(rgb[low], rgb[low + 1])]


def cells(page: "WebDriver", tokens: int, rows: int, first_x: int = 0) -> list:
    """Return the colors of the heat map's cells, [token][row] -> [r, g, b].

    tokens, rows: how many
    first_x: where the first cell begins, in pixels
    """
    return page.execute_script(
        """const [tokens, rows, firstX] = arguments, copy = document.createElement("canvas");
        [copy.width, copy.height] = [heatmap.width, heatmap.height];
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(heatmap, 0, 0);
        return [...Array(tokens).keys()].map((i) => [...Array(rows).keys()].map((j) =>
          [...context.getImageData(firstX + 14 * i + 6, 64 + 20 * j + 8, 1, 1).data].slice(0, 3)));""",
        tokens,
        rows,
        first_x,
    )


def point_at(page: "WebDriver", token: int, row: int, first_x: int = 0) -> None:
    """Move the pointer to a cell of the heat map."""
    from selenium.webdriver import ActionChains

    canvas = page.find_element("id", "heatmap")
    # selenium counts from the middle of the element
    x = first_x + COLUMN * token + 6 - canvas.size["width"] / 2
    y = LABELS + ROW * row + 9 - canvas.size["height"] / 2
    ActionChains(page).move_to_element_with_offset(canvas, int(x), int(y)).perform()
