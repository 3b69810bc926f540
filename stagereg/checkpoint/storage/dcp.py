"""``dcp``: torch's ``FileSystemWriter``, flushed and marked. The plain choice."""

from __future__ import annotations

from stagereg.checkpoint.storage.files import FileStorage
from stagereg.registry import register

__all__ = ["DcpStorage"]


@register("storage", "dcp")
class DcpStorage(FileStorage):
    """Writes what torch writes, through the page cache: one file a rank and thread.

    Plain ``torch.distributed.checkpoint.load`` reads it.

    Args:
        path: the directory; torch and the checkpointer name another for each checkpoint.
        thread_count: threads that write, one file each.
    """
