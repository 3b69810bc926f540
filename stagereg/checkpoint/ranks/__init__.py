"""Work with the other ranks: exchanges, merging of their entries, and the log of operations."""
