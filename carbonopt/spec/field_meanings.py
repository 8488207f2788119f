"""The meaning of each setting, which is the docstring below its field.

The tables of the documentation and the JSON schema of study files show it.
"""

import ast
import inspect
import itertools
from functools import cache

from pydantic import BaseModel


def field_meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings below the fields of a model and its bases, each on one line."""
    meanings = {}
    for cls in reversed(model.__mro__):
        if not cls.__module__.startswith("carbonopt."):
            continue
        for statement, below in itertools.pairwise(_statements(cls)):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    meanings[name] = " ".join(docstring.split())
    return meanings


@cache
def _statements(cls: type) -> list[ast.stmt]:
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    return definition.body
