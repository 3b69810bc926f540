"""Storages: each writes the bytes of a checkpoint and returns a reader of them, one plugin a file.

``protocol`` finds the storage that wrote a checkpoint; ``files`` and ``aligned`` write for ``dcp`` and ``safetensors``.
"""
