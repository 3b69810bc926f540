"""Recovery: heartbeats, emergency saves, restarts, and quarantine of checkpoints after which a run keeps crashing."""
