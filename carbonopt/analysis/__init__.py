"""From a study's records to its answer: pure functions, the same on every machine."""
