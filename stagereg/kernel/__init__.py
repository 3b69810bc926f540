"""The kernel: copying state dicts, and joining ranks without data, for several plugins.

``copier`` and the modules next to it make copies. In a join, ``membership``, or ``shadow`` with torch's protocol,
tracks the ranks that still have data. The kernel depends on torch, but not on stagers, the registry or Hydra.
"""
