"""The documentation site: it builds without a warning, has every page and name, and loads nothing from elsewhere."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import stagereg

from .support.pages import DOCS, Page

ROOT = DOCS.parent
NAV = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2], re.M)
BESIDE = {"SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"}
MKDOCS = Path(sys.prefix) / "docs" / "bin" / "python"
LIMIT_S = 400

TRAINERS = ("accelerate", "lightning", "torchtitan", "transformers")
NOT_RUN = 30
"""Blocks, at most, that no test runs: outputs, layouts of folders, JSON, and shell for an S3 store."""
RUN = {
    "callbacks.md": dict.fromkeys(("bash", "python"), "test_docs_pages.py"),
    "checkpoint-interval.md": {"bash": "test_docs_pages.py"},
    "commit-protocol.md": {"python": "test_docs_pages.py"},
    "coming-from-dcp.md": {"diff": "test_docs_site.py", "python": "test_docs_site.py"},
    "coming-from-torchtitan.md": {"diff": "integrations/test_torchtitan.py"},
    "data.md": {"python": "test_data.py"},
    "export.md": dict.fromkeys(("python", ""), "test_docs_pages.py"),
    "from-torchrun.md": {"diff": "test_docs_pages.py"},
    "guarantees.md": {"text": "extensions/recovery/test_crashes.py"},
    "contracts.md": {"python": "testing/test_join_contract.py"},
    **{f"integrations/{name}.md": {"diff": "integrations/test_added_lines.py"} for name in TRAINERS},
    "integrations/ray.md": {"python": "integrations/test_ray.py"},
    **dict.fromkeys(
        ("join.md", "join-recipes.md"), dict.fromkeys(("diff", "python", "yaml"), "extensions/joinables/test_docs.py")
    ),
    "nanogpt.md": {"diff": "examples/test_nanogpt.py"},
    **dict.fromkeys(
        ("plugins.md", "plugin-kinds.md"), dict.fromkeys(("console", "python", "yaml"), "test_docs_tutorials.py")
    ),
    "prove.md": dict.fromkeys(("console", "python"), "extensions/prove/test_page.py"),
    "quickstart.md": dict.fromkeys(("console", "python"), "test_docs_pages.py"),
    "rank-failures.md": {"bash": "test_docs_pages.py"},
    "retention.md": {"python": "test_docs_pages.py"},
    "several-machines.md": {"bash": "test_docs_pages.py"},
    "slurm.md": {"bash": "test_docs_pages.py", "yaml": "test_docs_pages.py"},
    "stagers.md": {"python": "test_docs_pages.py"},
    "storages.md": {"python": "testing/test_contracts.py"},
    "sweeps.md": dict.fromkeys(("console", "yaml"), "test_docs_pages.py"),
    "tutorial.md": dict.fromkeys(("console", "python", "yaml"), "test_docs_tutorials.py"),
}


def test_every_page_is_in_the_menu_once() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | BESIDE
    assert sorted(NAV) == sorted(pages)


def test_every_public_name_is_in_the_reference() -> None:
    shown = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    known = {name for name in dir(stagereg) if name not in ("__version__", "registry", "testing", "errors", "plugin")}
    known -= {
        name
        for name in known
        if isinstance(getattr(stagereg, name), type) and issubclass(getattr(stagereg, name), BaseException)
    }
    missing = {name for name in known if not re.search(rf"^(::: |      heading: )stagereg\.{name}$", shown, re.M)}
    assert missing == set(), "add ::: stagereg.NAME to a page of docs/reference"
    from stagereg import testing

    assert {name for name in testing.__all__ if f"::: stagereg.testing.{name}\n" not in f"{shown}\n"} == set()


def test_llms_txt_has_a_title_a_summary_and_every_page() -> None:
    text = (DOCS / "llms.txt").read_text()
    assert re.match(r"# stagereg\n\n> [^\n]+\n\n", text)
    links = re.findall(r"^- \[[^]]+\]\(([^)]+)\.html\)(?:: .+)?$", text, re.M)
    assert len(links) == text.count("\n- ")
    assert sorted(links) == sorted(page.removesuffix(".md") for page in NAV)


def test_the_index_of_error_messages_is_current() -> None:
    page = runpy.run_path(str(DOCS / "messages.py"))["page"]()
    assert (DOCS / "messages.md").read_text() == page, "run: python docs/messages.py > docs/messages.md"


def test_the_reference_of_the_command_line_is_current() -> None:
    page = runpy.run_path(str(DOCS / "commands.py"))["page"]()
    assert (DOCS / "commands.md").read_text() == page, "run: python docs/commands.py > docs/commands.md"


def test_the_plot_and_the_figures_of_the_readme_are_drawn_from_the_measured_samples() -> None:
    drawn = runpy.run_path(str(DOCS / "stall_plot.py"))
    measured = json.loads((DOCS / "images/stall.json").read_text())
    assert (DOCS / "images/stall.svg").read_text() == drawn["draw"](measured), "run: make plot"
    figures = {
        label: f"{value:.0f} ± {error:.0f} ms".replace("-", "\N{MINUS SIGN}")
        for label, value, error in drawn["bars"](measured)
    }
    shown = next(
        line for line in (ROOT / "README.md").read_text().splitlines() if "time lost per checkpoint, CPU" in line
    )
    assert {figures[each] for each in ("dcp.async_save", "stagereg (default)", "no checkpoint (A/A)")} == set(
        re.findall("\N{MINUS SIGN}?[0-9]+ ± [0-9]+ ms", shown)
    )


def messages(page: str) -> list[str]:
    return re.findall(r"^#### ``? ?(.+?) ?``?$", (DOCS / page).read_text(), re.M)


def any_of(message: str) -> str:
    return re.escape(message).replace(re.escape("..."), ".*")


def test_each_common_message_is_raised_by_the_source() -> None:
    common, raised = messages("reference/errors.md"), messages("messages.md")
    assert len(common) >= 40
    assert [each for each in common if not any(re.search(any_of(each), message) for message in raised)] == []


def test_messages_that_users_see_are_in_the_index() -> None:
    heads = messages("messages.md")
    assert len(heads) > 300
    patterns = [any_of(head) for head in heads]
    calls = (
        lambda: stagereg.build("stager", "pined"),
        lambda: stagereg.build("stager", "blocking", max_in_flight=0),
        lambda: stagereg.open_checkpoint("/nowhere"),
        lambda: stagereg.instantiate({"_target_": "os.system"}),
        lambda: stagereg.Checkpointer("x", every=0),
        lambda: stagereg.Join([]),
    )
    for call in calls:
        with pytest.raises(stagereg.StageregError) as raised:
            call()
        text = " ".join(str(raised.value).split())
        assert [pattern for pattern in patterns if re.fullmatch(pattern, text)], text


def blocks() -> Iterator[tuple[str, str, str]]:
    for path in sorted(DOCS.rglob("*.md")):
        name = str(path.relative_to(DOCS))
        yield from ((name, language, text) for language, text in Page(name).blocks)


def test_blocks_are_run_or_at_least_parsed_and_those_are_counted() -> None:
    not_run = 0
    for page, language, text in blocks():
        if test := RUN.get(page, {}).get(language):
            assert page.rpartition("/")[2].removesuffix(".md") in (ROOT / "tests" / test).read_text()
            continue
        if language == "python" and "console" in RUN.get(page, {}) and re.match(r"# \w+\.py\n", text):
            continue  # a program that its console blocks run
        not_run += language != "mermaid"  # a diagram
        if language == "python":
            ast.parse(text)
        elif language in ("yaml", "json"):
            assert list({"yaml": yaml.safe_load_all, "json": lambda t: [json.loads(t)]}[language](text))
        elif language == "bash":
            subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=60)
        else:
            assert language in ("", "text", "diff", "mermaid"), (page, language)
    assert not_run <= NOT_RUN


class Loads(HTMLParser):
    """What a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in ("script", "img", "iframe") and given.get("src"):
            self.found.append(str(given["src"]))
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.found.append(str(given["href"]))


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, of the pages in ``root``."""
    (line,) = re.findall(r"bin/python -m (mkdocs build .*)", (ROOT / "Makefile").read_text())
    command = [MKDOCS, "-m", *line.split(), "--site-dir", site]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(not MKDOCS.exists(), reason="make docs sets it up")
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    assert {page.removesuffix(".md") for page in NAV} <= {
        str(p.relative_to(tmp_path))[:-5] for p in tmp_path.rglob("*.html")
    }
    loaded = 0
    for page in tmp_path.rglob("*.html"):
        parser = Loads()
        parser.feed(page.read_text())
        for link in parser.found:
            folder = tmp_path if link.startswith("/") else page.parent  # of 404.html, which a server shows
            assert (folder / link.lstrip("/").partition("?")[0]).is_file(), (page, link)
            loaded += 1
    assert loaded > 100
    index = json.loads((tmp_path / "search/search_index.js").read_text().removeprefix("var __index = "))
    found = {each["location"].partition("#")[0] for each in index["docs"]}
    assert {"tutorial.html", "reference/errors.html", "reference/checkpoints.html"} <= found
    assert "messages.html" not in found


def programs(page: str) -> tuple[str, str]:
    """What the last diff of a page begins with, and what it makes of it."""
    lines = Page(page).of("diff")[-1].splitlines()
    return tuple("".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", mark)) for mark in "-+")  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_programs_of_the_page_on_dcp_go_on_where_they_were(tmp_path: Path) -> None:
    before, after = programs("coming-from-dcp.md")
    old, new = (re.sub("^[-+] *", "", line) for line in Page("coming-from-dcp.md").of("diff")[0].splitlines())
    assert old in before
    (resume,) = Page("coming-from-dcp.md").of("python")
    made = next(line for line in after.splitlines() if "Checkpointer(" in line)

    def start(folder: str, program: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "train.py").write_text(program)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path / folder, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "from step 0" in start("plain", before)
    assert "from step 30" in start("plain", after.replace(made, resume.strip()))
    assert "from step 0" in start("writer", f"import stagereg\n{before.replace(old, new)}")
    assert (tmp_path / "writer/kept/step-30/checksums.json").is_file()
    assert "from step 30" in start("writer", before)
    assert "from step 0" in start("new", after)
    assert "from step 30" in start("new", after)
