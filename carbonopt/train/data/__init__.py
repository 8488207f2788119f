"""Data sets: read, tokenized or turned into pixels, saved as arrays and cut into micro batches."""
