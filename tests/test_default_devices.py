"""No tensor of the project depends on the defaults of torch for devices and dtypes.

These are ``torch.set_default_device``, ``set_default_dtype`` and ``set_default_tensor_type``. Each call that creates a
tensor names its device and dtype. Tests of programs that set them are in ``checkpoint/promises``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).parents[1] / "stagereg"
FACTORIES = {function.__name__ for function in _device_constructors()} | {"from_file"}
LEGACY = {name for name in dir(torch) if name.endswith("Tensor")} - {"is_tensor"}
ON_THE_CPU = {"frombuffer"}  # which knows no other device
NOT_OURS = ("bench",)  # it measures what a program has


def calls(text: str) -> Iterator[tuple[int, str, set[str | None]]]:
    """The calls of functions of torch that create tensors: line, name, and the keywords."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for each in node.names:
                if each.name in FACTORIES | ON_THE_CPU:
                    yield node.lineno, f"from torch import {each.name}", set()
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        if ast.unparse(node.func.value) == "torch" and name in FACTORIES | ON_THE_CPU | LEGACY:
            yield node.lineno, name, {each.arg for each in node.keywords}


def lacking(text: str) -> list[tuple[int, str]]:
    found = []
    for line, name, named in calls(text):
        needed = {"dtype"} if name in ON_THE_CPU else {"dtype", "device"}
        if name in LEGACY or not needed <= named:
            found.append((line, name))
    return found


def test_each_tensor_of_the_project_has_its_device_and_dtype_named() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] not in NOT_OURS]
    assert len(files) > 200
    found = {str(file.relative_to(PACKAGE)): lacking(file.read_text()) for file in files}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "text",
    [
        "torch.zeros(1)",
        "torch.zeros(1, dtype=torch.int64)",
        "torch.full((1,), 2.0, device=x.device)",
        "torch.Tensor()",
        "torch.LongTensor([1])",
        "torch.frombuffer(data)",
        "from torch import empty",
        "torch.randperm(3, dtype=torch.int64)",
    ],
)
def test_a_call_that_names_neither_is_found(text: str) -> None:
    assert lacking(text)
    assert not lacking('torch.zeros(1, dtype=torch.int64, device="cpu"), torch.zeros_like(x), x.new_zeros(1)')
