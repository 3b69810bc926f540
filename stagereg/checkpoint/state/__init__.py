"""The program's objects in a checkpoint: entries, with states of modules and optimizers by names of parameters."""
