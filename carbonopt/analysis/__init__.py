"""Analyses of a study: pure functions from its records to its answer, equal on every machine."""
