"""Recovery: heartbeats, emergency saves, restarts, and quarantine of checkpoints that crash their runs."""
