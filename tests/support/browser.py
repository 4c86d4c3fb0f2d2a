"""Owns what tests see of a page in headless Chromium: its text, errors, colours, focus and pictures.

Debian's packages `chromium` and `chromium-driver` are used where they are installed. Elsewhere the tests are skipped,
or fail if the environment says BERT_TASKS_BROWSER=required. Must not know any page.
"""

import base64
import math
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from support.browser_scripts import CONTRAST, FOCUSED, HEADINGS, OVERFLOWING, UNREACHABLE

Scheme = Literal["light", "dark"]
PROGRAMS = ("chromium", "chromedriver")
PATIENCE = 60.0  # seconds for what takes one on an idle machine
SEVERE = {"SEVERE"}


@dataclass(frozen=True)
class LowContrast:
    """A text whose colour is too near to what lies behind it; colours as red, green, blue of 0 to 255."""

    text: str
    element: str
    ratio: float
    colour: tuple[int, ...]
    behind: tuple[int, ...]


class Browser:
    """One Chromium. ``driver`` is selenium's, for clicks and typing."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, target: str | Path, *, scheme: Scheme = "light", width: int = 1100, height: int = 800) -> None:
        """Shows a page (an address or a file) with the preferred colour scheme, in a window of CSS pixels."""
        preference = {"name": "prefers-color-scheme", "value": scheme}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preference, motion]})
        self.resize(width, height)
        self.driver.get_log("browser")  # drops what earlier pages said
        self.driver.get(target.resolve().as_uri() if isinstance(target, Path) else target)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def errors(self) -> list[str]:
        """What the console reported as an error since the page was opened or this was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in SEVERE]

    def text(self, selector: str = "body") -> str:
        """The text that is in the page, whether it is scrolled to or not."""
        content: str | None = self.driver.find_element(By.CSS_SELECTOR, selector).get_attribute("textContent")
        return "" if content is None else content

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: Callable[[], object], event: str, seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds:g} s: {event}"
            time.sleep(0.02)

    def low_contrast(self, minimum: float = 4.5) -> list[LowContrast]:
        """Every visible text, in SVG and form fields too, below a contrast ratio of WCAG; alpha is blended."""
        return [
            LowContrast(entry["text"], entry["element"], entry["ratio"], tuple(entry["colour"]), tuple(entry["behind"]))
            for entry in self.run(CONTRAST, minimum)
        ]

    def overflowing(self) -> list[str]:
        """Elements that make the page scroll sideways."""
        return list(self.run(OVERFLOWING))

    def unreachable(self) -> list[str]:
        """Elements that scroll and that the keyboard cannot reach."""
        return list(self.run(UNREACHABLE))

    def headings(self) -> list[int]:
        """The levels of the headings, from top to bottom."""
        return list(self.run(HEADINGS))

    def tab_stops(self, limit: int = 50) -> list[str]:
        """What gets the focus, as ``tag#id.class``, when Tab is pressed from the top of the page to its end."""
        self.run("document.activeElement?.blur(); window.scrollTo(0, 0)")
        stops: list[str] = []
        for _ in range(limit):
            self.driver.switch_to.active_element.send_keys(Keys.TAB)
            stop = self.run(FOCUSED)
            if stop is None:
                break
            stops.append(stop)
        return stops

    def is_blank(self) -> bool:
        """Whether the whole window has one colour."""
        return len(_colours(self._capture(self._window(), scale=0.125))) == 1

    def screenshot(self, path: Path, *, whole_page: bool = True, height: int | None = None) -> Path:
        """Writes a PNG of the page, or of its upper part."""
        area = self._page() if whole_page else self._window()
        if height is not None:
            area["height"] = min(area["height"], height)
        path.write_bytes(self._capture(area, scale=1))
        return path

    def _capture(self, area: dict[str, float], *, scale: float) -> bytes:
        options = {"format": "png", "captureBeyondViewport": True, "clip": {**area, "scale": scale}}
        return base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"])

    def _window(self) -> dict[str, float]:
        x, y, width, height = self.run("return [scrollX, scrollY, innerWidth, innerHeight]")
        return {"x": x, "y": y, "width": width, "height": height}

    def _page(self) -> dict[str, float]:
        width, height = self.run("const e = document.documentElement; return [e.clientWidth, e.scrollHeight]")
        return {"x": 0, "y": 0, "width": width, "height": height}


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A Chromium for as long as the block runs; skips the test, or fails it, where there is none."""
    programs = [shutil.which(name) for name in PROGRAMS]
    if None in programs:
        reason = "no chromium and chromedriver on the path (Debian: apt install chromium chromium-driver)"
        (pytest.fail if os.environ.get("BERT_TASKS_BROWSER") == "required" else pytest.skip)(reason)
    chromium, chromedriver = map(str, programs)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


def _colours(png: bytes) -> set[bytes]:
    """The colours of a picture with 8 bits a channel that is not interlaced."""
    width, _, _, colour_type = struct.unpack(">IIBB", png[16:26])
    size = {0: 1, 2: 3, 6: 4}[colour_type]
    data, offset = b"", 8
    while offset < len(png):
        (length,) = struct.unpack(">I", png[offset : offset + 4])
        if png[offset + 4 : offset + 8] == b"IDAT":
            data += png[offset + 8 : offset + 8 + length]
        offset += 12 + length
    lines, colours, above = zlib.decompress(data), set[bytes](), bytearray(width * size)
    for start in range(0, len(lines), width * size + 1):
        above = _line(lines[start], lines[start + 1 : start + 1 + width * size], above, size)
        colours |= {bytes(above[position : position + size]) for position in range(0, len(above), size)}
    return colours


def _line(filter_type: int, values: bytes, above: bytearray, size: int) -> bytearray:
    """A line of pixels from its differences (PNG's filters 0 to 4)."""
    line = bytearray(values)
    for index in range(len(line)):
        left = line[index - size] if index >= size else 0
        corner = above[index - size] if index >= size else 0
        up = above[index]
        paeth = min((left, up, corner), key=lambda value: abs(left + up - corner - value))
        line[index] = (line[index] + (0, left, up, (left + up) // 2, paeth)[filter_type]) % 256
    return line


def contrast(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """WCAG's ratio of two opaque colours, by its formula: what the page's script is checked against."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: tuple[float, ...]) -> float:
    shares = [value / 255 for value in colour]
    linear = [share / 12.92 if share <= 0.04045 else math.pow((share + 0.055) / 1.055, 2.4) for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
