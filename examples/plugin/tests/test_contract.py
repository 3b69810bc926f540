"""The contracts of stagers and joins, one test for each promise."""

from lean_export.contract import Bf16Contract as TestBf16
from lean_export.contract import EmaContract as TestEma
from lean_export.contract import EmaHookContract as TestEmaHook
from lean_export.contract import TimedDdpContract as TestTimedDdp

__all__ = ["TestBf16", "TestEma", "TestEmaHook", "TestTimedDdp"]
