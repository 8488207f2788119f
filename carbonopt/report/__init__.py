"""A study's report: a page, the same as Markdown, the figure for paper, the figures as JSON, and the winner's files."""
