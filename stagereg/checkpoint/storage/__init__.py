"""Storages: each writes the bytes of a checkpoint and returns a reader of them, one plugin a file.

<<<<<<< HEAD
``protocol`` is the protocol. ``dcp`` and ``safetensors`` are the plugins; below them, ``files`` and ``objects`` mark
what is written, in a directory or in an object store, ``aligned`` is a file that bypasses the page cache, ``envelope``
has what torch saves around a tensor's bytes, ``archive`` checks what ``torch.load`` is given, ``reader`` reads files
without trusting them, and ``lookup`` finds the storage that wrote a checkpoint.
=======
``protocol`` is the protocol. ``dcp`` and ``safetensors`` are the plugins; below them, ``files`` opens what they write:
``aligned``, a file that bypasses the page cache, or ``upload``, an object in a store. ``envelope`` has what torch saves
around a tensor's bytes, ``forwarding`` is a writer around another one, and ``lookup`` finds the storage that wrote a
checkpoint.
>>>>>>> e9d4b7e (The readers of torch's formats are asked for nothing that an index leaves out)
"""
