"""A study's report in all its formats.

The report is a web page, the same content as Markdown, the figures, tables and text for a paper,
the results as JSON, and the files of the recommended configuration.
"""
