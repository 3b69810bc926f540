"""Preemption: on SIGTERM or SIGUSR1 all ranks agree on a step, save it and exit with code 75."""
