"""What a checkpoint is: its parts, their names, checksums and structure, and what may be wrong with them.

Touches no disk. ``manifest`` the parts of a checkpoint, ``checksum`` of bytes, ``damage`` what is wrong with files,
``encoding`` the structure of a state as JSON, ``pickled`` objects that JSON cannot carry, ``index`` where each tensor
lies.
"""
