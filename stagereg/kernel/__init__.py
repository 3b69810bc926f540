"""The kernel copies state dicts for stagers, and tracks ranks without data for joins.

``copier`` and the modules next to it make copies. In a join, ``membership``, or ``shadow`` with torch's protocol,
tracks the ranks that still have data. The kernel depends on torch, but not on stagers, the registry or Hydra.
"""
