"""The optimizer, its arguments, schedules and averages, and DeepSpeed's configuration."""
