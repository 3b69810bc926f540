"""Pages in a real browser, headless Chromium through Playwright, with measures of their layout and contrast.

Tests that use this are skipped where Playwright or a Chromium is missing.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

A4_LANDSCAPE = 1032
"""CSS pixels between margins of 12 mm."""
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_CONTRASTS = """(selector) => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (c) => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(linear)
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const colour = parts(getComputedStyle(one).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const one of document.querySelectorAll(selector)) {
    const text = [...one.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    if (!text || !one.getClientRects().length) continue;
    const [a, b] = [light(parts(getComputedStyle(one).color)), light(ground(one))].sort((x, y) => y - x);
    found[text] = Math.min(found[text] ?? 99, (a + 0.05) / (b + 0.05));
  }
  return found;
}"""


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """Start a browser for a module of tests, or skip them."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install ./stagereg[test]")
    found = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if found is None:
        pytest.skip(f"needs one of {', '.join(_CHROMIUM)} on the path")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page in a context of its own, with its requests and the messages of its console.

    Args:
        browser: from :func:`launched`.
        path: of the page.
        width: of the window, in CSS pixels.
        settings: more of Playwright's, for the context.
    """

    def __init__(self, browser: Any, path: Path, width: int = 1280, **settings: Any) -> None:
        self.context = browser.new_context(offline=True, viewport={"width": width, "height": 900}, **settings)
        self.view = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.view.set_default_timeout(10_000)
        self.view.on("request", lambda request: self.asked.append(request.url))
        self.view.on("console", lambda message: self.complaints.append(message.text))
        self.view.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.view.goto(path.as_uri())

    @property
    def outside(self) -> list[str]:
        """Its requests, except for the file itself and data inside."""
        return [url for url in self.asked if not url.startswith(("file://", "data:"))]

    def box(self, selector: str, at: int = 0) -> dict[str, float]:
        found: dict[str, float] = self.view.locator(selector).nth(at).bounding_box()
        return found

    def widest(self) -> float:
        """How wide the page is, which scrolls sideways if that is more than the window."""
        return float(self.view.evaluate("document.documentElement.scrollWidth"))

    def faint(self, selector: str, least: float = 4.5) -> dict[str, float]:
        """The texts of elements whose contrast is less, with their contrast (WCAG 2.2, 1.4.3)."""
        found = self.view.evaluate(_CONTRASTS, selector)
        assert len(found) > 1
        return {text: ratio for text, ratio in found.items() if ratio < least}

    def press(self, key: str, until: str, most: int = 100) -> None:
        """Press a key until an expression of JavaScript is true."""
        for _ in range(most):
            self.view.keyboard.press(key)
            if self.view.evaluate(until):
                return
        raise AssertionError(f"{key} was pressed {most} times, and never: {until}")

    def printed(self, path: Path) -> list[tuple[str, float]]:
        """Print the page into a file; return its texts by page, and how far its words reach, as part of its width."""
        self.view.pdf(path=path, prefer_css_page_size=True)
        if shutil.which("pdftotext") is None:
            pytest.skip("needs pdftotext, of poppler-utils")
        command = ["pdftotext", "-bbox", str(path), "-"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        pages = []
        for page in text.split("<page ")[1:]:
            width = float(re.findall(r'width="([\d.]+)"', page)[0])
            words = re.findall(r'xMax="([\d.]+)" yMax="[\d.]+">(.*)</word>', page)
            assert words, "no page is empty"
            pages.append((" ".join(word for _, word in words), max(float(end) for end, _ in words) / width))
        return pages
