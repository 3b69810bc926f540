"""Stagers, one plugin per file. Each decides when the kernel copies, and into which memory.

``async_stager`` defines the protocol; ``host`` is the base of stagers that copy before they return (``blocking``,
``pinned_cached``). ``overlapped`` copies later (``deferred_copy``): ``guard`` finds memory that only an optimizer
writes and calls back before each write, ``hooks`` before methods of torch; ``step_observer`` finds other writes, and
``device_sources`` finds writes on accelerators.
"""
