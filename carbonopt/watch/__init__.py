"""The live page of a study: the report's own document, drawn again as the study changes.

It reads the storage and never writes to it.
"""
