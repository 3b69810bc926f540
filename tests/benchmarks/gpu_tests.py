"""Run pytest, and record each test in a file as soon as the test begins and ends.

``python tests/benchmarks/gpu_tests.py RECORDS DONE ARGUMENT...`` passes the arguments to pytest. DONE is a JSON list of
tests that do not run. The process that starts this program reads RECORDS, one JSON object per line, and stops the
program if a test takes too long. Then the program runs again, without the tests that have ended, so a test that hangs
or crashes costs only itself. This does not need the plugin pytest-timeout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


class Recorder:
    """A plugin of pytest that appends to ``records``, and skips the tests in ``done`` (node IDs)."""

    def __init__(self, records: Path, done: set[str]) -> None:
        self._records, self._done = records, done
        self._outcomes: dict[str, tuple[str, str]] = {}

    def _append(self, **record: object) -> None:
        with open(self._records, "a") as file:
            file.write(json.dumps(record) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._done]
        self._append(collected=[item.nodeid for item in items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._append(test=report.nodeid, outcome="failed", message=report.longreprtext[-300:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._append(test=nodeid, outcome="running", message="")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-300:]
            # A failed teardown after a skipped test is a failure.
            if self._outcomes.get(report.nodeid, ("", ""))[0] != "failed":
                self._outcomes[report.nodeid] = report.outcome, reason
        if report.when == "teardown":
            outcome, message = self._outcomes.get(report.nodeid, ("passed", ""))
            self._append(test=report.nodeid, outcome=outcome, message=message)


if __name__ == "__main__":
    file, ended = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    sys.exit(pytest.main(sys.argv[3:], plugins=[Recorder(file, set(ended))]))
