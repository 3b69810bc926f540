"""Buckets: checkpoints in object stores, leases as locks, and restores that read each byte once for all ranks."""
