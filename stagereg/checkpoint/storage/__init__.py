"""Storages: what writes the bytes of a checkpoint and names their reader, one plugin a file.

``protocol`` is what a storage is. ``dcp``, ``direct`` and ``safetensors`` are the plugins; below them, ``files`` writes
files and their marks in one go, ``reader`` reads them without trusting them, ``archive`` looks at what ``torch.load``
is given, ``blob`` knows what torch saves around a tensor's bytes, ``aligned`` is a file that the page cache does not
see, and ``choice`` finds the storage that wrote a checkpoint.
"""
