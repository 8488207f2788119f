"""Figures, one file each: drawn once for the page and for paper."""
