"""Storages: each writes the bytes of a checkpoint and returns a reader of them, one plugin a file.

``protocol`` is the protocol. ``dcp``, ``direct`` and ``safetensors`` are the plugins; below them, ``files`` writes
files and computes their marks in one pass, ``objects`` does so for object stores, ``reader`` reads them without
trusting them, ``archive`` checks what ``torch.load`` is given, ``blob`` has what torch saves around a tensor's bytes,
``aligned`` is a file that bypasses the page cache, ``forwarding`` a writer around another one, and ``lookup`` finds the
storage that wrote a checkpoint.
"""
