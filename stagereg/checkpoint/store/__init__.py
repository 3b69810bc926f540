"""The storage location of checkpoints: a directory or a bucket, its lock, and retention."""
