"""The text, as arrays of token ids, and the micro batches that are cut from it."""
