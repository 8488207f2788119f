"""What goes into a paper: figures, tables, text and references, and a document that has them all."""
