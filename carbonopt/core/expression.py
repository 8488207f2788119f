"""Arithmetic in the placeholders of a script's command.

An example is `{learning_rate * global_batch_size / 256}`. An expression has numbers, names, `+ - *
/ // % **`, brackets and a few functions. Anything else is refused when the expression is read, and
a value that would grow without bound is refused when it is computed.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from carbonopt.core.errors import BadInput
from carbonopt.core.values import Scalar

Number = bool | int | float
_LONGEST = 500  # characters of an expression
_LARGEST = 1e300  # the largest value, also of a part of the expression
_LARGEST_EXPONENT = 1000
_MOST_DIGITS = 100


def _divided(left: Number, right: Number) -> Number:
    """Divide; whole numbers that divide without a remainder stay whole.

    Most options that take such numbers want them so.
    """
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > _LARGEST_EXPONENT:
        raise ValueError(f"an exponent must be at most {_LARGEST_EXPONENT}, but is {exponent:g}")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError(f"{base:g} ** {exponent:g} is no real number")
    return result  # type: ignore[no-any-return]


def _rounded(number: Number, digits: int = 0) -> Number:
    if abs(digits) > _MOST_DIGITS:
        raise ValueError(f"round takes at most {_MOST_DIGITS} digits, but got {digits:g}")
    return round(number, digits) if digits else round(number)


_OPERATORS: dict[type[ast.AST], Callable[..., Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divided,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS: dict[str, Callable[..., Number]] = {
    "min": min,
    "max": max,
    "round": _rounded,
    "int": int,
    "float": float,
    "abs": abs,
    "sqrt": math.sqrt,
    "log": math.log,
}


@dataclass(frozen=True)
class Expression:
    """An expression that was read; `Expression.parse` makes one from its text."""

    text: str
    names: tuple[str, ...]  # names of the values that it needs
    _tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> "Expression":
        """Read an expression.

        Raises:
            BadInput: if the text is no expression.
        """
        try:
            if len(text) > _LONGEST:
                raise ValueError(f"it has {len(text)} characters, and may have {_LONGEST}")
            tree = ast.parse(text.strip(), mode="eval").body
            _check(tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = "it is no arithmetic" if isinstance(error, SyntaxError) else str(error)
            raise BadInput(
                f"{{{text}}} must be a dimension's name, or arithmetic with numbers, names, + - * /"
                f" // % ** and {', '.join(FUNCTIONS)}: {why}."
            ) from error
        functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        names = [
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and id(node) not in functions
        ]
        return cls(text, tuple(dict.fromkeys(names)), tree)

    @property
    def is_name(self) -> bool:
        """True if the expression is a name alone, which may stand for any text."""
        return isinstance(self._tree, ast.Name)

    def value(self, values: Mapping[str, Scalar]) -> Scalar:
        """Compute the value of the expression.

        Raises:
            BadInput: if it can't be computed with these values.
        """
        if self.is_name:
            return values[self.names[0]]
        try:
            return _computed(self._tree, values)
        except (ValueError, ArithmeticError, TypeError) as error:
            given = ", ".join(f"{name} {values[name]}" for name in self.names)
            why = error.args[-1] if error.args else type(error).__name__
            raise BadInput(
                f"{{{self.text}}} can't be computed for {given or 'no values'}: {why}."
            ) from error


def _check(node: ast.AST) -> None:
    """Raise ValueError for whatever an expression may not have."""
    match node:
        case ast.Constant(value=bool() | str() | bytes() | complex() | None):
            raise ValueError(f"{node.value!r} is no number")
        case ast.Constant(value=int() | float()) | ast.Name():
            pass
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            _check(left)
            _check(right)
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in _OPERATORS:
            _check(operand)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
            name in FUNCTIONS and arguments
        ):
            for argument in arguments:
                _check(argument)
        case _:
            raise ValueError(f"{ast.unparse(node)} is not allowed")  # type: ignore[arg-type]


def _computed(node: ast.AST, values: Mapping[str, Scalar]) -> Number:
    result: Any
    match node:
        case ast.Constant(value=int() | float() as number):
            result = number
        case ast.Name(id=name):
            result = values[name]
            if isinstance(result, str):
                raise ValueError(f"{name} is {result!r}, which is no number")
        case ast.BinOp(left=left, op=operation, right=right):
            result = _OPERATORS[type(operation)](_computed(left, values), _computed(right, values))
        case ast.UnaryOp(op=operation, operand=operand):
            result = _OPERATORS[type(operation)](_computed(operand, values))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            result = FUNCTIONS[name](*(_computed(argument, values) for argument in arguments))
        case _:
            raise AssertionError(f"{node} was not checked")
    if not abs(result) <= _LARGEST:
        raise ValueError(f"{ast.unparse(node)} is too large")  # type: ignore[arg-type]
    return result  # type: ignore[no-any-return]
