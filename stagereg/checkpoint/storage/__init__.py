"""Storages: each writes the bytes of a checkpoint and returns a reader of them, one plugin a file.

``protocol`` is the protocol. ``dcp`` and ``safetensors`` are the plugins; below them, ``files`` and ``objects`` mark
what is written, in a directory or in an object store, ``aligned`` is a file that bypasses the page cache, ``envelope``
has what torch saves around a tensor's bytes, ``archive`` checks what ``torch.load`` is given, ``reader`` reads files
without trusting them, and ``lookup`` finds the storage that wrote a checkpoint.
"""
