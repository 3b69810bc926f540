"""``stagereg bench integrations``: each trainer is measured with its own saving and with stagereg's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagereg import cli
from stagereg.bench.integration_rows import row_names

TRAINERS = ["accelerate", "lightning", "transformers", "torchtitan"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_way_of_each_trainer_is_measured(trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(trainer, reason="make frameworks installs it")
    names = [row for row in row_names() if row.startswith(f"{trainer}:")]
    assert {f"{trainer}:none", f"{trainer}:own", f"{trainer}:stagereg"} <= {*names}
    file, rows = tmp_path / "result.json", ",".join(names)
    where = ["--dir", str(tmp_path), "--json", str(file)]
    assert cli.main(["bench", "integrations", "--scale", "0.001", "--rounds", "1", "--rows", rows, *where]) == 0
    (group,) = json.loads(file.read_text())["groups"]
    assert [row["row"] for row in group["rows"]] == names
    blocked = {row["row"]: row["blocked"]["median"] for row in group["rows"]}
    assert all(blocked[name] > blocked[f"{trainer}:none"] for name in names[1:])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120
    assert list(tmp_path.iterdir()) == [file]
