"""Communication between ranks: exchanges, the merging of entries, and the log of operations."""
