"""The page of a sweep, in a real browser: answer first, readable, self-contained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stagereg.sweep.render.page as page
from stagereg.sweep.answer import answer
from stagereg.sweep.comparison import Comparison

from ...support.samples import compared, row_of, write_hydra

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="72pt" height="36pt" viewBox="0 0 72 36"><g id="a"/></svg>'
EVIL = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 2'>"


class Opened:
    """A page in a browser, with its requests and console messages."""

    def __init__(self, context: Any, path: Path) -> None:
        self.view = context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.view.set_default_timeout(40_000)
        self.view.on("request", lambda request: self.asked.append(request.url))
        self.view.on("console", lambda message: self.complaints.append(message.text))
        self.view.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.view.goto(path.as_uri())


Opener = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of hydra-stagereg[test]")
    if CHROMIUM is None:
        pytest.skip("needs chromium, and there is none on the path")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opener]:
    contexts = []

    def open_(text: str, **settings: Any) -> Opened:
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        contexts.append(browser.new_context(offline=True, **settings))
        return Opened(contexts[-1], path)

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def usual(comparison: Comparison) -> str:
    return page.compare_page(comparison, SVG)


def test_answer_and_table_come_first_nothing_is_asked(opened: Opener, usual: str, comparison: Comparison) -> None:
    one = opened(usual, viewport={"width": 1280, "height": 800})
    assert [url for url in one.asked if not url.startswith(("file://", "data:"))] == []
    assert one.complaints == []
    view = one.view
    assert view.locator("figure img").evaluate("(one) => one.naturalWidth") > 0, "its picture is inside"
    assert view.locator("h1").inner_text() == answer(comparison)
    assert "The machine was busy." in view.locator(".warnings").inner_text()
    assert view.locator("header pre").inner_text() == "python train.py stager=overlapped join.mode=counted"
    assert view.locator("#table-0").bounding_box()["y"] < 600
    best = view.locator("#table-0 tbody tr").first
    assert best.inner_text().split()[:3] == ["best", "overlapped", "counted"]
    assert best.locator("td.best b").inner_text() == "*"
    assert best.locator("td.best b").get_attribute("aria-label") == "best"
    assert best.locator("td.tie b").inner_text() == "~"


def test_texts_of_a_run_are_escaped(opened: Opener, tmp_path: Path) -> None:
    write_hydra(tmp_path, [], config=f"name: {EVIL}\n")
    rows = [
        row_of({EVIL: EVIL}, {"stall_ms": (1.0,)}, {"stall_ms": "best"}, directory=tmp_path),
        row_of({EVIL: "b"}, {}, error=EVIL),
    ]
    job = replace(rows[0].jobs[0], environment={EVIL: EVIL}, command=EVIL)
    evil = replace(compared(rows, warnings=[EVIL]), directory=Path(EVIL))
    evil = replace(evil, rows=(replace(rows[0], jobs=(job,), note=EVIL), rows[1]))
    text = page.compare_page(evil, SVG)
    assert EVIL not in text
    assert "<script" not in text
    one = opened(text)
    assert one.view.locator("img").count() == 1
    one.view.locator("summary").first.click()
    assert f"name: {EVIL}\n" in one.view.locator("details pre").all_text_contents()
    one.view.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=y onerror=\"window.owned = 3\">')")
    one.view.wait_for_function("document.querySelector('img[src=y]').complete")
    assert one.view.evaluate("window.owned") is None
    assert not any(url.startswith("http") for url in one.asked)


def test_what_differs_between_runs_is_listed_but_for_the_load() -> None:
    row = row_of({"a": "1"}, {"stall_ms": (1.0, 2.0)})
    moved = replace(row.jobs[1], environment={"cores": 8, "load": [9.75]})
    text = page.compare_page(compared([replace(row, jobs=(row.jobs[0], moved))]))
    assert "<dd>2; 8</dd>" in text
    assert "9.75" not in text


def test_it_is_dark_where_wanted_and_only_its_table_scrolls(opened: Opener, usual: str) -> None:
    view = opened(usual, color_scheme="dark", viewport={"width": 360, "height": 700}).view
    ground = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(json.loads(f"[{ground[4:-1]}]")) < 60
    assert view.evaluate("document.documentElement.scrollWidth") <= 360
    assert view.locator(".scroll:has(#table-0)").evaluate("(one) => one.scrollWidth > one.clientWidth")
