"""Hooks for MkDocs, which builds the site (``mkdocs.yml``).

Pages link to files outside ``docs``, such as SECURITY.md, CHANGELOG.md and examples, because they are also read in the
repository. Each of these files becomes a page of the site, programs as a code block, and the links lead there. The
scripts of the pages come from the environment that ``make docs`` created, not from a CDN.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from griffe import Class, Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_BESIDE = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")
_SCRIPTS = {"scripts/mermaid.js": "package/dist/mermaid.min.js", "scripts/iframe-worker.js": "package/shim/index.js"}
_LINK = re.compile(r"(\]\()([^)#:\s]+)([^)\s]*\))")
_ROLE = re.compile(r":\w+:`~?([^`]*)`")
_CELL_CODE = re.compile(r"`[^`\n]*`")
_BOOST = {"options.md": 2, "stagers.md": 2, "troubleshooting.md": 2, "comparison.md": 0.5, "CHANGELOG.md": 0.3}
"""Search weight by page; programs have a lower weight than pages."""
_BOOST_OF_FOLDER = {"examples": 0.3, "reference": 0.5}
_NOT_SEARCHED = "messages.md"
"""The index of all messages: its many entries would hide other pages. reference/errors.md has the common messages."""
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".md": "markdown"}


class Docstrings(Extension):
    """Converts docstrings, which are written for ``help()``, to Markdown."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Use the parameters of ``__new__`` for a class without ``__init__``."""
        if "__new__" in cls.members and "__init__" not in cls.members:
            cls.set_member("__init__", cls.members["__new__"])

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Replace Sphinx roles in docstrings by code in Markdown."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside ``docs`` that pages link to."""
    for name in _BESIDE:
        files.append(File.generated(config, name, abs_src_path=str(_ROOT / name)))
    texts = [Path(file.abs_src_path).read_text() for file in files.documentation_pages() if file.abs_src_path]
    linked = {link for text in texts for link in re.findall(r"\]\((?:\.\./)+(examples/[^)#]+)\)", text)}
    for path in sorted(path for path in linked if (_ROOT / path).exists()):
        page = File.generated(config, f"{path}.md", content=_code(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    for name, packed in _SCRIPTS.items():
        files.append(File.generated(config, name, abs_src_path=str(Path(sys.prefix) / packed)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to pages of the site."""
    source = page.file.src_uri
    boost = _BOOST.get(source, _BOOST_OF_FOLDER.get(source.partition("/")[0], 1))
    page.meta["search"] = {"exclude": True} if source == _NOT_SEARCHED else {"boost": boost}
    here = posixpath.dirname(source if source in _BESIDE else f"docs/{source}")

    def lead(link: re.Match[str]) -> str:
        to = posixpath.normpath(posixpath.join(here, link[2])).removeprefix("docs/")
        if files.get_file_from_path(f"{to}.md") is not None:
            to += ".md"
        return f"{link[1]}{posixpath.relpath(to, posixpath.dirname(source) or '.')}{link[3]}"

    # In a table, GitHub requires `a \\| b` and shows `a | b`; on the site, code in a cell may contain a plain bar.
    markdown = _CELL_CODE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)
    return _LINK.sub(lead, markdown)


def _code(path: str) -> str:
    """Return the page of a program, or of all files in a directory."""
    found = _ROOT / path
    each = [found] if found.is_file() else sorted(file for file in found.rglob("*") if file.suffix in _LANGUAGES)
    blocks = [
        f'````{_LANGUAGES[file.suffix]} title="{file.relative_to(_ROOT)}"\n{file.read_text()}````' for file in each
    ]
    return f"# {path}\n\n" + "\n\n".join(blocks) + "\n"
