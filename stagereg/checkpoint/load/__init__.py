"""One restore, a checkpoint as a mapping, and as one file. Knows nothing of :mod:`stagereg.checkpoint.save`."""
