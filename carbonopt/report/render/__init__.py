"""Documents as HTML, Markdown, LaTeX, JSON and plain text. No renderer knows what a section is about."""
