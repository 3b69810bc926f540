"""Retention by metric: which checkpoints stay, by what was logged about them."""
