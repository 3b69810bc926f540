"""The signals that request a run to save and exit. Launchers forward them; ranks save, then exit with code 75."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_SIGNAL_S = 5.0  # seconds within which a repeated signal counts as the same signal, forwarded by another process
