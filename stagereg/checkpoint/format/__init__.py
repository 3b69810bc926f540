"""What a checkpoint is: its parts, their names, checksums and structure, and what may be wrong with them; no disk."""
