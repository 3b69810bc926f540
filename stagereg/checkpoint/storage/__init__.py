"""Storages: plugins that write the files of a checkpoint, and return readers for these files.

``protocol`` defines a storage and finds storages by name. ``files`` and ``aligned`` help storages to write files.
"""
