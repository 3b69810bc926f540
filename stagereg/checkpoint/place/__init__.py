"""Places: directories of checkpoints, local or remote, and how a written checkpoint gets its name there.

``protocol`` is what a place is asked. ``local`` is a directory of this machine's file systems, shared ones included,
where a checkpoint is committed by renaming it. ``remote`` is a prefix of an object store, reached through fsspec, which
cannot rename: there a checkpoint is committed by its manifest, the object that is written last. ``choice`` tells a path
from a URL. ``retry`` is how often something is tried that a network may lose.

What a checkpoint consists of, its manifest and its marks, is the same everywhere and belongs to
:mod:`stagereg.checkpoint.layout`. Which bytes are in its files is the storage's business.
"""
