"""The kernel copies state dicts for stagers, and tracks ranks without data for joins.

``copier`` and the modules that it uses make copies. ``membership`` tracks which ranks of a join still have data;
``shadow`` does this with torch's protocol. The kernel depends on torch, but not on stagers, the registry or Hydra.
"""
