"""Draw docs/page.png and, in the dark, docs/page_gates.png: the page of a trained run in a real browser.

    python docs/draw_page.py runs/demo_cpu

Run from the repository root; needs chromium, chromedriver and selenium.
"""

import sys
import time
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import browser, served

FOLDER = Path(__file__).parent
PROMPT = "class Reader:\n    def read(self, name):\n"


def generate(driver, seed: int) -> None:
    driver.find_element("id", "prompt").send_keys(PROMPT)
    driver.find_element("name", "seed").send_keys(str(seed))
    driver.find_element("id", "generate").click()
    while not driver.find_element("id", "generate").is_enabled():
        time.sleep(0.2)
    driver.execute_script("scroller.scrollLeft = 0; text.scrollTop = 0; document.activeElement.blur()")


def point_at(driver, token: int, row: int) -> None:
    """Put the pointer on a cell of the heat map."""
    from selenium.webdriver import ActionChains

    canvas = driver.find_element("id", "heatmap")
    x, y = 14 * token + 7 - canvas.size["width"] / 2, 64 + 20 * row + 9 - canvas.size["height"] / 2
    ActionChains(driver).move_to_element_with_offset(canvas, int(x), int(y)).perform()
    time.sleep(0.3)


def keep(picture: bytes, name: str) -> None:
    path = FOLDER / name
    path.write_bytes(picture)
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"drew {path.name}, {path.stat().st_size / 1024:.0f} KiB")


def main():
    with served(Path(sys.argv[1]).resolve()) as (address, _):
        with browser(1280, 1030) as driver:
            driver.get(address)
            generate(driver, seed=0)
            point_at(driver, token=36, row=3)
            keep(driver.get_screenshot_as_png(), "page.png")
        with browser(1000, 1100, dark=True) as driver:
            driver.get(address)
            generate(driver, seed=0)
            driver.find_elements("css selector", "#sites button")[3].click()
            point_at(driver, token=23, row=3)
            driver.execute_script("form.hidden = true; document.querySelector('header').hidden = true")
            point_at(driver, token=23, row=3)
            keep(driver.find_element("tag name", "main").screenshot_as_png, "page_gates.png")


if __name__ == "__main__":
    main()
