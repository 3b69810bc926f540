"""Storages: each writes the files of a checkpoint and returns a reader for them; one plugin per file.

``protocol`` finds the storage that wrote a checkpoint; ``files`` and ``aligned`` write for ``dcp`` and ``safetensors``.
"""
