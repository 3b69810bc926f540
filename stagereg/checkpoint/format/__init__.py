"""The parts of a checkpoint, their names, checksums and structure, and their possible errors. Touches no disk."""
