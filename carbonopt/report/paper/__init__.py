"""A report's files for a paper.

They are figures, tables, text and references, and a document that has them all.
"""
