"""A run as a Chrome trace, to be opened at https://ui.perfetto.dev or ``chrome://tracing``.

Each rank is a process. On its thread lie steps and, between them, stalls; the staging and the writing of its
checkpoints, several of which may be under way at a time, are asynchronous events below; what it logged are counters.
The format is "Trace Event Format" by Google; times are microseconds since the start of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stagereg.sweep.run import RankRecord, Run, Span, step_spans


def trace_text(run: Run) -> str:
    """Return the trace of ``run`` as a JSON document; ranks that recorded nothing but their start are in it too."""
    events = [event for rank in run.ranks for event in _of_rank(rank, run.began)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False)


def _of_rank(rank: RankRecord, began: float) -> Iterator[dict[str, Any]]:
    on_thread = {"pid": rank.rank, "tid": 0}

    def at(seconds: float) -> float:
        return round((seconds - began) * 1e6, 3)

    host = rank.start.get("host", "")
    yield {"ph": "M", "name": "process_name", **on_thread, "args": {"name": f"rank {rank.rank} {host}".rstrip()}}
    yield {"ph": "M", "name": "process_sort_index", **on_thread, "args": {"sort_index": rank.rank}}
    yield {"ph": "M", "name": "thread_name", **on_thread, "args": {"name": "training"}}
    for name, spans in (("step", step_spans(rank)), ("stall", rank.stalls)):
        for span in spans:
            times = {"ts": at(span.start), "dur": round(span.seconds * 1e6, 3)}
            yield {"ph": "X", "name": name, "cat": name, **on_thread, **times, "args": _about(span)}
    works = [("staging", span) for span in rank.stages] + [("writing", span) for span in rank.writes]
    works += [("writing to the tier", span) for span in rank.tier_writes]
    works += [(f"copying to {each.machine}", each.span) for each in rank.transfers]
    for number, (name, span) in enumerate(works):
        same = {"name": f"{name} of step {span.step}", "cat": name, "id": f"{rank.rank}.{number}", **on_thread}
        yield {"ph": "b", **same, "ts": at(span.start), "args": _about(span)}
        yield {"ph": "e", **same, "ts": at(span.end)}
    for _, when, values in rank.logs:
        for name, value in values.items():
            if value is not None:
                yield {"ph": "C", "name": name, **on_thread, "ts": at(when), "args": {name: value}}


def _about(span: Span) -> dict[str, int]:
    return {"step": span.step, "bytes": span.nbytes} if span.nbytes else {"step": span.step}
