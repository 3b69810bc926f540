"""NUMA binding: with ``numa=auto``, each rank and its memory stay on the NUMA node of the rank's GPU."""
