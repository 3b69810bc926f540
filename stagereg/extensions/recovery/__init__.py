"""Recovery: heartbeats, emergency saves, restarts of a run, and quarantine of checkpoints that crash it."""
