"""What of the program a checkpoint has: entries, with the states of modules and optimizers by names of parameters."""
