"""Stagers, which copy state dicts for checkpoints: one plugin per file.

``async_stager`` defines the protocol. ``host`` is the base of stagers that copy before ``stage`` returns (``blocking``,
``pinned_cached``). ``overlapped`` copies later, with ``deferred_copy``: ``guard`` determines the memory that only an
optimizer writes, and calls back before each write; ``step_observer`` and ``device_sources`` detect other writes.
"""
