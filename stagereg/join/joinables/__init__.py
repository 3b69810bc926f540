"""Joinables: what can take part in a join, one plugin a file. Each pairs an object with its hook."""
