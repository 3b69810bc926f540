"""Retention by logged metrics, and checkpoints that lose their optimizer state when they are older."""
