"""Lists phrases that readers have to read twice: ``python tests/support/prose.py``.

The phrases break the writing rules in CONTRIBUTING.md. Checks messages (raised, logged, or help of a command), pages,
docstrings and comments. The subjects of recent commits must be imperative, with at most 72 characters. Exits with code
1 if a text or a subject breaks a rule.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_HIDDEN = {"docs/commands.md", "docs/messages.md", "docs/options.md"}  # generated from texts that are checked
_START = r"(?:^|[.;:,(|] )"
_BE = r"(?:is|are|was|were)"
RULES = {
    'name the thing, not "what …"': (
        _START + r"[Ww]hat (?:is|was|are|has|have|it|they|ranks?|a|an|the|no|other|each)\b(?![^.]*\?)",
    ),
    "negate the verb, not the noun": (
        rf"\b{_BE} none\b(?! of)",
        rf"(?<![Tt]here )\b{_BE} no (?!longer\b|more\b|less\b|need\b|limit\b|other\b)[a-z]",
    ),
    'repeat the noun, not "that of"': (
        r"\b(?:than|as|by|from|in|for|not) (?:that|those) (?:of|who|with)\b",
        r"\bthose who\b|\bthe one before\b",
    ),
    'a subject, not "One that"': (r"(?:^|[.;:] )(?:One|None|Those|That) (?:that|which|who|of|with|without)\b",),
    "resume or continue": (r"\b(?:go(?:es|ing)?|went|gone) on\b",),
    "skip": (r"\bpass(?:es|ed|ing)? (?:it |them )?over\b",),
    "programs do not speak": (
        rf"\b{_BE} (?:told|said|heard)\b",
        r"\bsays (?:so|of|at|who)\b|\b(?:learns?|hears?|heard) of\b",
    ),
    "surviving ranks": (rf"\b(?:ranks|those|which|that|who) (?:that |who )?{_BE} left\b(?! (?:out|behind|to))",),
    "release or abort": (r"\blet(?:s|ting)? go\b|\bgiv(?:e|es|en|ing) up\b|\bgave up\b",),
    "arrive or finish": (r"\bcom(?:e|es|ing) to (?:its|an|their) end\b|\b(?:has|have|had) (?:not |once )?come\b",),
    "if or when, not where": (r"(?:^|[.;] )Where (?!to\b)[a-z]+|, where (?:it|there|that|nothing|no|any)\b",),
    "otherwise": (r"[,;] else\b(?! [01`])",),
    "for example when": (r"\bas (?:by|after|without) (?:a|an|the|its|on|any)\b",),
    "again, as usual, for lack of": (
        r"\banew\b|\bas ever\b|\ball the same\b|\bin vain\b|\bfor want of\b",
        r"\bby (?:itself|themselves)\b",
    ),
    "is stored in": (r"\b(?:lies|lie|lay|stands) (?:in|on|at|below|beside|there|outside)\b",),
    "people only": (r"\b(?:[Ss]ome|[Nn]o)body\b|\b[Ww]hoever\b|(?:^|[.;:] )Who (?:is|has|holds|writes|may)\b",),
    "check or access": (r"\blook(?:s|ed|ing)? (?:at|whether|after)\b",),
    "invalid or unusable": (r"\b(?:that|nothing|what) (?:is|was) wrong\b|\bof no use\b|\bno use for\b",),
    "next to, under, instead of": (
        r"\bbesides?\b|\bbelow `*(?:torchrun|stagereg)",
        r"\bin (?:the|its) place of\b|\bin place of\b",
    ),
    "identical or replicated": (r"\b(?:have|has|had|are|is|ranks) (?:\w+ )?alike\b|\bhave as well\b",),
    "must or will": (rf"\b{_BE} to (?:be|have|go|come|end|write|read|save|take|stay|wait)\b",),
    "a term of the glossary": (
        r"\bnear(?:er)? (?:copies|steps|tier)\b|\bmisspelt\b|\bpulses?\b",
        r"\bthe moment of\b|\bgood checkpoint|\bdamaged\b",
    ),
}
"""Regular expressions by the better wording."""
_OF_COMMENTS = "begin with a noun or a verb"
RULES[_OF_COMMENTS] = (r"\A(?:of|for|by|in|to|from) (?:which|whom|what)\b|\A(?:of|those|whose|else|likewise)\b",)

_COMPILED = {rule: re.compile("|".join(patterns), re.M) for rule, patterns in RULES.items()}


class Text(NamedTuple):
    """A piece of prose: ``kind`` is "message", "page", "docstring", "comment", or "continued": its next line."""

    kind: str
    place: str
    text: str


def texts() -> Iterator[Text]:
    """All prose of the package and its pages."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for path in pages:
        name = str(path.relative_to(ROOT))
        if name not in _HIDDEN:
            prose = re.sub(r"^```.*?^```$|<[^>]*>|`[^`\n]*`", "", path.read_text(), flags=re.M | re.S)
            yield from (Text("page", name, each) for each in prose.split("\n"))
    for path in (ROOT / "stagereg").rglob("*.py"):
        yield from _of_source(str(path.relative_to(ROOT)), path.read_text())


def _of_source(name: str, source: str) -> Iterator[Text]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield Text("docstring", f"{name}:{getattr(node, 'lineno', 1)}", _plain(text))
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _prints(node)):
            for each in ast.walk(node):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield Text("message", f"{name}:{each.lineno}", _plain(each.value))
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# type:"):
            goes_on = token.line.lstrip().startswith("#") and token.start[0] == last + 1
            yield Text(
                "continued" if goes_on else "comment", f"{name}:{token.start[0]}", _plain(token.string.lstrip("# "))
            )
            last = token.start[0]


def _prints(call: ast.Call) -> bool:
    """Whether a call logs, warns, or defines the help of an option or a command."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in {"debug", "info", "warning", "error", "warn", "add_argument", "add_parser", "ArgumentParser", "echo"}


def _plain(text: str) -> str:
    return re.sub(r"``.*?``|`[^`]*`", "", " ".join(text.split()))


def hits() -> list[tuple[Text, str, str]]:
    """Each hit: its text, the phrase, and the rule that the phrase breaks."""
    found = [
        (text, rule, pattern.finditer(text.text))
        for text in texts()
        for rule, pattern in _COMPILED.items()
        if text.kind == "comment" or rule != _OF_COMMENTS
    ]
    return [(text, hit[0].strip(" .;:,(|"), rule) for text, rule, each in found for hit in each]


def subjects() -> list[str]:
    """Subjects of the last commits that are too long or do not begin with a verb in the imperative."""
    done = subprocess.run(["git", "log", "-20", "--no-merges", "--format=%s"], cwd=ROOT, capture_output=True, text=True)
    return [
        each for each in done.stdout.splitlines() if len(each) > 72 or not re.match(r"[A-Z]\w*(?<!ed)(?<!ing)\b", each)
    ]


def main() -> int:
    found = hits()
    wrong = subjects()
    for text, phrase, rule in found:
        print(f"{text.place}: {text.kind}: {phrase!r}: {rule}")
    for subject in wrong:
        print(f"commit subject: {subject!r}: an imperative, at most 72 characters")
    print(f"prose: {len(found)} phrases to reword, {len(wrong)} commit subjects")
    return int(bool(found or wrong))


if __name__ == "__main__":
    raise SystemExit(main())
