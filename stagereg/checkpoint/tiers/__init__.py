"""Copies of checkpoints nearer than the store: in a machine's own memory or disk, and on other machines."""
