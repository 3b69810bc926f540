"""Planning: how often to save, from what saves cost and how often machines fail."""
