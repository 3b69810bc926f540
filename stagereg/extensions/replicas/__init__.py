"""Replicas: ranks that hold the same tensors compare them, and each writes a shard."""
