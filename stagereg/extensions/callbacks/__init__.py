"""Callbacks: what rank 0 does with each complete checkpoint, such as copying it elsewhere."""
