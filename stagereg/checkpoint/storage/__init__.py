"""Storages: each writes the bytes of a checkpoint and returns a reader of them, one plugin a file.

``protocol`` is the protocol, and finds the storage that wrote a checkpoint. ``dcp`` and ``safetensors`` are the
plugins; below them, ``files`` opens what they write, through ``aligned``, in a directory past the page cache, or in an
object store. ``envelope`` has what torch saves around a tensor's bytes.
"""
