"""The report's figures, one file each; each is drawn once for the page and for paper."""
