"""Start the program and its ranks, on one or several machines, and end the run."""
