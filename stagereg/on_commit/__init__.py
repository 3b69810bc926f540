"""What happens after a checkpoint is complete: the protocol of ``on_commit``, its calls, and one component a file."""
