"""Join hooks: what a rank without data does for one joinable, one plugin a file."""
