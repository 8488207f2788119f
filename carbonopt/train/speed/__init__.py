"""Cheaper steps and cheaper generation of the same results."""
