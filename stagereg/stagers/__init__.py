"""Stagers: one plugin a file, each a thin choice of memory over the kernel's copy.

``protocol`` is what a stager is; ``host`` is the body shared by those that copy before they return.
"""
