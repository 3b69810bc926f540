"""Where checkpoints are: a directory or a bucket, its lock, and retention; ``storage`` makes the bytes of the files."""
