"""Retention by metric: select the checkpoints to retain by their logged metrics."""
