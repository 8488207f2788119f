"""Renderers of documents as HTML, Markdown, LaTeX and plain text.

No renderer knows what a section is about.
"""
