"""The page of a sweep, in a real browser: answer first, readable on every screen and on paper, self-contained."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stagereg.sweep.render.page as page
from stagereg.sweep.answer import answer
from stagereg.sweep.comparison import Comparison, compare

from ...support.browser import A4_LANDSCAPE, Opened, launched
from ...support.samples import compared, failed, jobs, row_of, write_hydra

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="72pt" height="36pt" viewBox="0 0 72 36"><g id="a"/></svg>'
EVIL = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 2'>"
COLUMNS = ("stall_ms", "lost_percent", "samples_per_s", "staged_gib_per_s", "write_gib_per_s", "peak_host_gib")
FIRST = "document.querySelector('#table-0 tbody th a').textContent"

Opener = Callable[..., Opened]


@functools.cache
def grid(rows: int) -> Comparison:
    """A sweep of that many rows, one of which is an A/A row if there are several; stalls are worse from row to row."""

    def runs(at: float) -> list[dict[str, float]]:
        return [{name: (at + 1.5) * (9 + up) * (1 + run / 100) for up, name in enumerate(COLUMNS)} for run in range(4)]

    names = ["stager=overlapped join.mode=planned lr=0.30000000000000004"]
    names += [f"stager=pinned_cached join.mode={('planned', 'counted')[at % 2]} lr={at}" for at in range(1, rows - 1)]
    return compare(jobs({name: runs(at) for at, name in enumerate(names)}, again=runs(0.001) if rows > 1 else ()))


def lacking() -> Comparison:
    """Rows without the ranking metric, with NaN and infinity, and one with a failed run."""
    figures = [{"loss": float("nan")}, {"loss": float("inf"), "stall_ms": 2.375}, {"loss": 3.0, "stall_ms": 1.125}]
    many = jobs({f"a={at}": [each] * 4 for at, each in enumerate(figures)})
    return compare([*many, failed(Path("sweep/99"), 99, many[1].overrides)])


def all_failed() -> Comparison:
    return compare([failed(Path(f"sweep/{at}"), at, (f"stager={at}",)) for at in range(2)])


CASES: dict[str, Callable[[], Comparison]] = {
    "1": lambda: grid(1),
    "4": lambda: grid(4),
    "61": lambda: grid(61),
    "long": lambda: compare(
        jobs({f"a={'x' * 90}{at} b=torch.{'y' * 90}": [{"stall_ms": at + 1.5}] * 4 for at in (1, 2)})
    ),
    "lacking": lacking,
    "failed": all_failed,
}
MARGIN = 12 / 297  # of the width of a page
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as started:
        yield started


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opener]:
    pages: list[Opened] = []

    def open_(text: str, width: int = 1280, **settings: Any) -> Opened:
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        pages.append(Opened(browser, path, width, **settings))
        return pages[-1]

    yield open_
    for one in pages:
        assert (one.outside, one.complaints) == ([], [])
        one.context.close()


@pytest.fixture(scope="module")
def usual(comparison: Comparison) -> str:
    return page.compare_page(comparison, SVG)


@pytest.fixture(scope="module")
def many() -> str:
    return page.compare_page(grid(61), SVG)


def test_answer_and_table_come_first(opened: Opener, usual: str, comparison: Comparison) -> None:
    one = opened(usual)
    view, found = one.view, answer(comparison)
    assert view.locator("figure img").evaluate("(one) => one.naturalWidth") > 0, "its plot is inside"
    assert view.locator("h1").inner_text() == found.headline
    for sentence in found.evidence:
        assert sentence in view.locator(".lede").inner_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "The machine was busy." in view.locator(".warnings").inner_text()
    assert view.locator("header pre").inner_text() == "python train.py stager=overlapped join.mode=counted"
    assert one.box("#table-0")["y"] < 600
    heads = [text.split("\n")[0] for text in view.locator("#table-0 thead th").all_inner_texts()]
    assert heads == ["stager", "join.mode", "stall ms", "runs", "samples/s", "loss"]
    best = view.locator("#table-0 tbody tr").first
    assert best.inner_text().split()[:5] == ["overlapped", "best", "counted", "9.10*", "8.20–10.10"]  # noqa: RUF001
    assert best.locator("td.best b").get_attribute("aria-label") == "best"
    assert best.locator("td.tie b").inner_text() == "~"


def test_texts_of_a_run_are_escaped(opened: Opener, tmp_path: Path) -> None:
    write_hydra(tmp_path, [], config=f"name: {EVIL}\n")
    rows = [
        row_of({EVIL: EVIL, "b": EVIL}, {"stall_ms": (1.0,)}, {"stall_ms": "best"}, directory=tmp_path),
        row_of({EVIL: "b", "b": "c"}, {}, error=EVIL),
    ]
    job = replace(rows[0].jobs[0], environment={EVIL: EVIL}, command=EVIL)
    evil = replace(compared(rows, warnings=[EVIL]), directory=Path(EVIL))
    evil = replace(evil, rows=(replace(rows[0], jobs=(job,), note=EVIL), rows[1]))
    text = page.compare_page(evil, SVG)
    assert EVIL not in text
    assert text.count("<script") == 1, "its own"
    one = opened(text)
    assert one.view.locator("img").count() == 1
    one.view.locator("summary").first.click()
    assert f"name: {EVIL}\n" in one.view.locator("details pre").all_text_contents()
    one.view.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=y onerror=\"window.owned = 3\">')")
    one.view.wait_for_function("document.querySelector('img[src=y]').complete")
    one.view.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.owned = 4'}))"
    )
    assert one.view.evaluate("window.owned") is None
    assert len(one.complaints) >= 3, "the policy refused the picture, its handler, and the script"
    one.complaints.clear()
    one.asked[:] = [url for url in one.asked if url.startswith("http")]


def test_what_differs_between_runs_is_listed_but_for_the_load() -> None:
    row = row_of({"a": "1"}, {"stall_ms": (1.0, 2.0)})
    first = replace(row.jobs[0], environment={"cores": 2, "load": [1.0, 1.5, 2.6]})
    moved = replace(row.jobs[1], environment={"cores": 8, "load": [9.75]})
    text = page.compare_page(compared([replace(row, jobs=(first, moved))]))
    assert "<dd>2; 8</dd>" in text
    assert "<dd>1.0, 1.5, 2.6</dd>" in text
    assert "9.75" not in text


@pytest.mark.parametrize(
    ("case", "width", "scheme"),
    [
        pytest.param(case, width, scheme, marks=() if (case, width, scheme) in fast else SLOW)
        for fast in [{("61", 400, "dark"), ("4", 1400, "light")}]
        for case in CASES
        for width in (400, 1400)
        for scheme in ("light", "dark")
    ],
)
def test_it_is_readable_on_every_screen(opened: Opener, case: str, width: int, scheme: str) -> None:
    made = CASES[case]()
    one = opened(page.compare_page(made, SVG), width, color_scheme=scheme)
    assert one.widest() <= width, "only its boxes scroll"
    ground = one.view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(json.loads(f"[{ground[4:-1]}]")) < 60) == (scheme == "dark")
    assert one.faint("body *") == {}
    assert one.view.locator("#table-0 tbody tr").count() == len(made.rows)
    filtered = one.view.locator("img").evaluate("(one) => getComputedStyle(one).filter")
    assert (filtered != "none") == (scheme == "dark")
    if made.best is not None:
        head, ranking = one.box("#table-0 tbody th"), one.box("#table-0 tbody td.measured")
        assert head["x"] + head["width"] <= ranking["x"] + 1
        assert ranking["x"] + ranking["width"] <= width - 12
        if case in ("4", "61"):
            assert one.box("#table-0 tbody th a")["height"] < 30, "short names are whole"
    one.view.locator(".scroll").first.evaluate("(one) => { one.scrollLeft = 1e6; }")
    scroll, head = one.box(".scroll"), one.box("#table-0 tbody th")
    assert head["x"] == pytest.approx(scroll["x"] + 1, abs=1), "the first column stays"
    last = one.box("#table-0 tbody tr:first-child > :last-child")
    assert last["x"] + last["width"] <= scroll["x"] + scroll["width"] + 1, "the last one can be reached"


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == "61" else SLOW) for case in CASES])
def test_on_paper_nothing_is_cut_or_missing(opened: Opener, tmp_path: Path, case: str) -> None:
    made = CASES[case]()
    one = opened(page.compare_page(made, SVG), A4_LANDSCAPE, color_scheme="dark")
    one.view.emulate_media(media="print", color_scheme="dark")
    assert one.view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert one.faint("main *") == {}
    ends = one.view.evaluate("[...document.querySelectorAll('th, td')].map((one) => one.getBoundingClientRect().right)")
    assert max(ends) <= A4_LANDSCAPE
    scrolling = (
        "[...document.querySelectorAll('*')].filter((one) => /auto|scroll/.test(getComputedStyle(one).overflow))"
    )
    assert one.view.evaluate(f"{scrolling}.map((one) => one.tagName)") == []
    pages = one.printed(tmp_path / "page.pdf")
    assert max(end for _, end in pages) < 1 - MARGIN
    text = " ".join(text for text, _ in pages)
    stalls = [cell.text for cell in page.tables_of.shown_cells(made, made.ranking) if cell]
    assert [stall for stall in stalls if stall not in text] == []
    with_rows = [text for text, _ in pages if any(f" {stall} " in f" {text} " for stall in stalls[-40:])]
    assert all("stall ms" in text for text in with_rows), "the heads are repeated"


@SLOW
def test_many_columns_fit_on_paper(opened: Opener, tmp_path: Path) -> None:
    names = [f"returned.figure_of_the_run_number_{at}" for at in range(16)]
    made = compare(jobs({f"a={at}": [dict.fromkeys(names, 1234.5 + at)] * 4 for at in range(3)}), names[0], "minimize")
    one = opened(page.compare_page(made), A4_LANDSCAPE)
    one.view.emulate_media(media="print")
    end = one.box("#table-0")
    assert end["x"] + end["width"] <= A4_LANDSCAPE
    assert max(end for _, end in one.printed(tmp_path / "page.pdf")) < 1 - MARGIN


def test_it_can_be_sorted_and_filtered_by_keyboard_and_the_same_again_stays_below_its_twin(
    opened: Opener, many: str
) -> None:
    one = opened(many)
    rows = "[...document.querySelectorAll('#table-0 tbody tr')]"
    stalls = (
        f"{rows}.filter((row) => !row.classList.contains('aa')).map((row) => Number(row.children[3].dataset.value))"
    )
    twins = f"{rows}.find((row) => row.classList.contains('aa')).previousElementSibling.children[3].dataset.value"
    before, twin = one.view.evaluate(stalls), one.view.evaluate(twins)
    assert before == sorted(before)
    one.press("Tab", "document.activeElement.ariaLabel === 'Sort by stall ms'")
    assert one.view.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    one.view.keyboard.press("Enter")
    assert one.view.locator("th[aria-sort]").evaluate_all(
        "(each) => each.map((one) => [one.innerText, one.ariaSort])"
    ) == [["stall ms", "descending"]]
    assert one.view.evaluate(stalls) == before[::-1]
    assert one.view.evaluate(twins) == twin
    one.view.get_by_role("button", name="Sort by lr").click()
    lrs = [float(text) for text in one.view.locator("#table-0 tbody td:nth-child(3)").all_inner_texts() if text]
    assert lrs == sorted(lrs), "as numbers"
    assert one.view.evaluate(twins) == twin
    one.press("Shift+Tab", "document.activeElement.type === 'search'")
    one.view.keyboard.type("OVER planned")
    assert one.view.locator("#table-0 tbody tr:visible").all_inner_texts()[1].startswith("the same again")
    assert one.view.locator("output").inner_text() == "2 of 61 rows"


def test_missing_numbers_come_last_however_it_is_sorted(opened: Opener) -> None:
    rows = [{"loss": loss, "stall_ms": at + 1.0} for at, loss in enumerate((float("nan"), float("inf"), 3.0, -2.0))]
    made = compare(jobs({f"a={at}": [row] for at, row in enumerate([*rows, {"stall_ms": 9.0}])}))
    view = opened(page.compare_page(made)).view
    for expected in (["-2", "3", "inf"], ["inf", "3", "-2"]):
        view.get_by_role("button", name="Sort by loss").click()
        shown = view.locator("#table-0 tbody td:last-child").all_inner_texts()
        assert shown[:3] == expected
        assert sorted(shown[3:]) == ["-", "nan"]


def test_numbers_and_what_stands_for_them_are_flush_right(opened: Opener) -> None:
    one = opened(page.compare_page(lacking()))
    ends = """[...document.querySelectorAll('#table-0 td.measured:nth-child(2)')].map((cell) => {
      const range = document.createRange();
      range.selectNode(cell.firstChild);
      return [cell.firstChild.data, range.getBoundingClientRect().right];
    })"""
    found = dict(one.view.evaluate(ends))
    assert found.keys() == {"-", "1.12", "2.38"}
    assert max(found.values()) - min(found.values()) < 1


def test_without_scripts_the_page_is_complete(opened: Opener, many: str) -> None:
    view = opened(many, java_script_enabled=False).view
    assert view.locator("#table-0 tbody tr").count() == 61
    assert view.locator("button, input").count() == 0


def test_a_row_leads_to_its_details_and_back(opened: Opener, usual: str) -> None:
    view = opened(usual).view
    assert view.locator("#table-0 tbody th[scope=row]").count() == 5
    for at in (0, 4):
        view.locator("#table-0 tbody th a").nth(at).click()
        detail = view.locator("details").nth(at)
        detail.locator("pre").first.wait_for()
        detail.get_by_text("Back to the table").click()
        assert view.locator("tr:target").get_attribute("id") == f"row-{at + 1}"


def test_each_option_has_a_line_for_each_value(opened: Opener) -> None:
    def runs(stall: float) -> list[dict[str, float]]:
        return [{"stall_ms": stall}] * 2

    rows = {
        f"stager={a} join.mode={b}": runs(x * y)
        for a, x in (("p", 1.0), ("q", 3.0))
        for b, y in (("r", 4.0), ("s", 2.0))
    }
    view = opened(page.compare_page(compare(jobs(rows)))).view
    assert [text.split("\t") for text in view.locator("#options tbody tr").all_inner_texts()] == [
        ["stager", "p", "3", "best", "4"],
        ["", "q", "9", "+200 %", "4"],
        ["join.mode", "s", "4", "best", "4"],
        ["", "r", "8", "+100 %", "4"],
    ]
