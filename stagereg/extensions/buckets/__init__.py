"""Buckets: checkpoints in object stores, their leases, and reading each byte once for all ranks."""
