"""Runs on GPUs go on after a failure as those on CPUs do: the survivors' save, a tier, restarts.

``make gpu`` runs this on GPUs. Two ranks share one, if need be, with gloo alone, since NCCL refuses ranks that share a
device; on two GPUs NCCL is tried too, with gloo beside it. On CPUs the same steps show that these tests can pass.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ...support.programs import Program
from .test_restarts import CONFIG, SCRIPT

GPUS = torch.cuda.device_count()
BACKENDS = {"cpu": "cpu:gloo,cuda:gloo", "gloo": "cpu:gloo,cuda:gloo", "nccl": "cpu:gloo,cuda:nccl"}


def on_gpus(backend: str, count: int) -> object:
    needed = pytest.mark.skipif(
        count > GPUS, reason=f"{backend} between GPUs needs {count} of them, and {GPUS} are here"
    )
    return pytest.param(backend, marks=[pytest.mark.gpu, needed])


CPU = pytest.param("cpu", marks=[pytest.mark.slow, pytest.mark.in_place_of_gpu])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", [CPU, on_gpus("gloo", 1), on_gpus("nccl", 2)])
@pytest.mark.parametrize(
    ("what", "options"),
    [
        pytest.param("kill", [], id="survivors-save"),
        pytest.param("kill all", ["tier=memory", "tier.every=1"], id="tier"),
    ],
)
def test_a_run_goes_on_from_its_last_step_and_ends_as_one_that_was_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, what: str, options: list[str]
) -> None:
    program, device = Program(tmp_path, CONFIG, SCRIPT), "cpu" if backend == "cpu" else "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", {"cpu": "", "gloo": "0", "nccl": "0,1"}[backend])

    def end(*arguments: str) -> list[dict[str, torch.Tensor]]:
        ended = program.run(f"device={device}", *arguments, start=[sys.executable])
        assert ended.returncode == 0, ended.stderr
        return torch.load(program.answers / "end", map_location="cpu")  # type: ignore[no-any-return]

    expected = end()
    for rank in (0, 1):
        (program.answers / f"{rank}.json").unlink()
    found = end(f"what={what}", *options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    answers = program.answers_of(0)
    assert [each["begun"] for each in answers] == [None, 8]
    assert [each["backend"] for each in answers] == [BACKENDS[backend]] * 2
