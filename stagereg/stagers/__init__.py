"""Stagers: one plugin a file, each a thin choice of when and into which memory the kernel copies.

``async_stager`` is the protocol, with its optional members. ``host`` is the base of those that copy before they return
(``blocking``, ``pinned_cached``, ``shared``), ``bounded`` their bound on host memory. ``incremental`` shares what did
not change, ``overlapped`` copies later, and ``torch_default`` is torch's own.
"""
