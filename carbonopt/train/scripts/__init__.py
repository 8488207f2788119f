"""A user's own training script: its command, its files and its processes."""
