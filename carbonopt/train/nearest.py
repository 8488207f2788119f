"""A misspelt name is refused with the name that was probably meant."""

import difflib
from collections.abc import Iterable


def hint(unknown: str, known: Iterable[str]) -> str:
    """'did you mean X?', or all the known names where none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(unknown, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(names)}."
