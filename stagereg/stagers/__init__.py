"""Stagers, one plugin per file. Each decides when the kernel copies, and into which memory.

``async_stager`` defines the protocol; ``host`` is the base of stagers that copy before they return (``blocking``,
``pinned_cached``). ``overlapped`` copies later (``deferred_copy``): ``guard`` finds memory that only an optimizer
writes, and calls back before each write; ``step_observer`` and ``device_sources`` (on accelerators) find other writes.
"""
