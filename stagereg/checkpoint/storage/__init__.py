"""Storages, plugins that write the files of a checkpoint and return readers for them.

``protocol`` defines a storage and finds it by name; ``files`` and ``aligned`` write files for ``dcp`` and others.
"""
