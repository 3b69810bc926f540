"""Plots the training time lost per checkpoint: ``python docs/stall_plot.py RESULT.json > docs/images/stall.svg``.

RESULT.json is the output of ``stagereg bench stall --json``. Each bar is the median of a row, with a line of the
median's standard error, 0.93 IQR / sqrt(n).
"""

from __future__ import annotations

import json
import sys
from typing import Any

ROWS = {
    "none": "no checkpoint (A/A)",
    "overlapped+dcp": "stagereg (default)",
    "pinned_cached+dcp": "stagereg, stager=pinned_cached",
    "blocking+dcp": "stagereg, stager=blocking",
    "overlapped+torch_dcp": "stagereg, storage=torch_dcp",
    "blocking+torch_dcp": "stagereg, blocking and torch_dcp",
    "torch:process": "dcp.async_save, in a process",
    "torch:async_save": "dcp.async_save",
}
_LEFT, _WIDTH, _ROW = 300, 420, 34


def bars(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return label, median and standard error of each row, in ms."""
    rows = {row["row"]: row["lost"] for row in result["groups"][0]["rows"]}
    found = []
    for name, label in ROWS.items():
        lost = rows[name]
        error = 0.93 * (lost["q3"] - lost["q1"]) / len(lost["samples"]) ** 0.5
        found.append((label, 1000 * lost["median"], 1000 * error))
    return found


def draw(result: dict[str, Any]) -> str:
    """Return the plot as SVG, which is readable on a light and a dark page."""
    found = bars(result)
    low = min(0.0, *(value - error for _, value, error in found))
    high = max(value + error for _, value, error in found)

    def at(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * _WIDTH

    about, rounds = result["environment"], len(result["groups"][0]["rows"][0]["lost"]["samples"])
    lines = [
        '<text x="16" y="28" font-size="17" font-weight="600">Training time lost per checkpoint, ms</text>',
        f'<text x="16" y="48" fill="#666">168 MiB, one rank, torch {about["torch"]}, {about["cores"]} cores; '
        f"median ± standard error of {rounds} rounds in turns; lower is better</text>",
    ]
    for number, (label, value, error) in enumerate(found):
        y = 70 + number * _ROW
        color = "#3f51b5" if label.startswith("stagereg") else "#9e9e9e"
        start, end = sorted((at(0), at(value)))
        shown = f"{value:.0f} ± {error:.0f}".replace("-", "&#8722;")
        lines += [
            f'<text x="{_LEFT - 12}" y="{y + 16}" text-anchor="end">{label}</text>',
            f'<rect x="{start:.1f}" y="{y}" width="{max(end - start, 1):.1f}" height="22" fill="{color}"/>',
            f'<path d="M{at(value - error):.1f} {y + 11}H{at(value + error):.1f}" stroke="#212121" stroke-width="2"/>',
            f'<text x="{max(at(value + error), at(0)) + 8:.1f}" y="{y + 16}">{shown}</text>',
        ]
    height = 80 + len(found) * _ROW
    lines.append(f'<path d="M{at(0):.1f} 62V{height - 12}" stroke="#616161"/>')
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 110} {height}" font-size="14" '
        f'font-family="system-ui, sans-serif">\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(draw(json.load(file)), end="")
