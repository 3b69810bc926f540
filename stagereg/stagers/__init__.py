"""Stagers: one plugin a file, each a choice of when, and into which memory, the kernel copies.

``async_stager`` has the protocol; ``host`` the body of those that copy before they return (``blocking``,
``pinned_cached``). ``overlapped`` copies later (``deferred_copy``); ``guard`` finds what only an optimizer writes and
calls before each write, ``hooks`` before methods of torch, and ``step_observer`` finds other writes.
``device_sources`` finds writes on accelerators.
"""
