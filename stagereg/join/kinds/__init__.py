"""What can take part in a join, one kind a file: the joinable, and the hook for ranks without data."""
