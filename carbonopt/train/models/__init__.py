"""The trained model: its kinds, weights, checks and memory."""
