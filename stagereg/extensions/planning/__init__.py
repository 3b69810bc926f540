"""Planning: choose the checkpoint interval from the cost of saves and the rate of failures."""
