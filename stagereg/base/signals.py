"""The signals that ask a run to save and exit: launchers forward them, and ranks exit with 75 once they have saved."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_SIGNAL_S = 5.0  # seconds in which a signal that comes again is the same one, from another of those who forward it
