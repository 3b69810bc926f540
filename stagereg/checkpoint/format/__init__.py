"""The checkpoint format: file names, checksums, the manifest, the index, and the structure of a state. Does no I/O."""
