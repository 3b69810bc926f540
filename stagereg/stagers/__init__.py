"""Stagers: one plugin a file, each a thin choice of when and into which memory the kernel copies.

``protocol`` is what a stager is; ``host`` is the body shared by those that copy before they return (``blocking``,
``pinned_cached``, ``shared``). ``incremental`` shares what did not change, and ``overlapped`` copies later, with
``guard`` telling it what only an optimizer writes, and the moment before it does. ``torch_default`` is torch's own.
"""
