"""The program and its ranks: starting them, several machines, preemption, and how a run ends."""
