"""Local tiers: copies of checkpoints on the machines that train, in memory or on their disks, and on peers."""
