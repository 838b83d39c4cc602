"""The page as people have it: sample.py --serve in a process of its own, and chromium without a
window.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking "
    "--disable-component-update --disable-sync --force-device-scale-factor=1"
)

COLUMN, ROW, LABELS = 14, 20, 64  # pixels of the heat map
RAMP = ["#f3f3f1", "#d5e3d0", "#9cc7b0", "#4a9a8c", "#14595f"]
LIGHT = ["#2166ac", "#92c5de", "#f3f3f1", "#f4a582", "#b2182b"]


@contextlib.contextmanager
def serve_run(run: Path, *options: str):
    """(address, process) of `sample.py RUN --serve` on a free port."""
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
def serve_model(model, tokenizer, /, **facts):
    """Address of the page of a model in this process; facts: what GET /model says, changed."""
    import uvicorn

    from model.generation import Sampling
    from serving.app import create_app, describe_model, listen

    defaults = {**vars(Sampling()), "max_new_tokens": 2000, "stop": []}
    known = describe_model(model, tokenizer, {"model": "a model"}, defaults)
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(create_app(model, tokenizer, {**known, **facts}), log_level="warning")
    )
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
    assert not thread.is_alive()


def missing_program() -> str | None:
    """What a browser lacks here, None: nothing."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed (apt-get install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install selenium)"
    return None


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 1000, dark: bool = False):
    """A selenium driver of a new chromium, whose console is kept (`get_log("browser")`)."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for option in (*OPTIONS.split(), f"--user-data-dir={profile}"):
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


def text(page, name):
    return page.find_element("id", name).text


def color(value, stops=LIGHT, lowest=0.0, highest=2.0):
    """The color of a number on the linear scale between five stops; as it is, of a gate."""
    rgb = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops]
    place = 4 * (value - lowest) / (highest - lowest)
    low = min(int(place), 3)
    return [a + (place - low) * (b - a) for a, b in zip(rgb[low], rgb[low + 1])]


def cells(page, tokens, rows, left=0):
    """The colors at the middles of the heat map's cells, [token][row] -> [r, g, b]; the first
    begins at `left`.
    """
    return page.execute_script(
        """const [tokens, rows, left] = arguments, copy = document.createElement("canvas");
        [copy.width, copy.height] = [heatmap.width, heatmap.height];
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(heatmap, 0, 0);
        return [...Array(tokens).keys()].map((i) => [...Array(rows).keys()].map((j) =>
          [...context.getImageData(left + 14 * i + 6, 64 + 20 * j + 8, 1, 1).data].slice(0, 3)));""",
        tokens,
        rows,
        left,
    )


def point_at(page, token, row, left=0):
    from selenium.webdriver import ActionChains

    canvas = page.find_element("id", "heatmap")
    x, y = (
        left + COLUMN * token + 6 - canvas.size["width"] / 2,
        LABELS + ROW * row + 9 - canvas.size["height"] / 2,
    )
    ActionChains(page).move_to_element_with_offset(canvas, int(x), int(y)).perform()
