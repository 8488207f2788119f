"""A figure of matplotlib that a notebook shows without pyplot."""

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A matplotlib figure that a notebook shows as the value of a cell.

    Notebooks show other figures only if pyplot has been imported.
    """

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
