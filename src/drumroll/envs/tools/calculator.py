"""Arithmetic that a model writes: read as Python's syntax tree and walked, never evaluated by Python itself.

Whatever the expression, the work is small: its length, its depth and the size of every number on the way are bounded.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from drumroll.envs.tools.tool import ToolError
from drumroll.registry import register

MAX_CHARS = 1000
MAX_DEPTH = 300
"""A sum of that many numbers is that deep."""
MAX_BITS = 3400
"""Of an integer: a little more than 1000 digits."""

Number = int | float

_SYMBOL = re.compile(r"\s+|[-+*/%(),]|(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?\d++)?+(?![\w.])|(?:abs|min|max|round|sqrt)\b", re.ASCII)
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=\d)")
"""Python refuses them in whole numbers."""


@register.tool("calculator")
async def calculator(expression: str) -> str:
    """Computes an arithmetic expression. Whole numbers are exact, also large ones.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, and abs, min, max, round, sqrt, such as (12 + 34) * 5
    """
    return format_number(evaluate(expression))


def evaluate(expression: str) -> Number:
    """The value of an expression, or a `ToolError` that says why it has none. Example: `evaluate("2**10 / 4")` → 256."""
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; {MAX_CHARS} are allowed")
    _check_symbols(expression)
    try:
        tree = ast.parse(_LEADING_ZEROS.sub("", expression.strip()), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ToolError("this is not an arithmetic expression") from error
    try:
        return _walk(tree.body, 0)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("a number is too large") from error


def format_number(value: Number) -> str:
    """An integer with all its digits, another number with twelve. Example: `format_number(0.1 + 0.2)` → "0.3"."""
    return str(value) if isinstance(value, int) else format(value, ".12g")


def _check_symbols(expression: str) -> None:
    position = 0
    while position < len(expression):
        symbol = _SYMBOL.match(expression, position)
        if symbol is None:
            raise ToolError(
                f"'{expression[position : position + 20]}' cannot be read: "
                f"numbers, + - * / // % **, parentheses, abs, min, max, round and sqrt are allowed"
            )
        position = symbol.end()


def _walk(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ToolError(f"the expression is nested more than {MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_walk(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _walk(operand, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_walk(left, depth + 1), _walk(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            function, fewest, most = _FUNCTIONS[name]
            if not fewest <= len(args) <= most:
                raise ToolError(f"{name} takes {'at least one number' if most > 2 else f'{fewest} to {most} numbers'}, not {len(args)}")
            return _bounded(function(*(_walk(argument, depth + 1) for argument in args)))
    raise ToolError("this is not an arithmetic expression")


def _bounded(value: Any) -> Number:
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ToolError("the result is not a real number" if isinstance(value, complex) else "a number is too large")


def _divide(left: Number, right: Number) -> Number:
    """Exact where both are whole and it leaves no rest."""
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > 2 * MAX_BITS and abs(base) > 1:
        raise ToolError("a number is too large")
    return base**exponent


def _sqrt(value: Number) -> Number:
    if value < 0:
        raise ToolError("the square root of a negative number is not a real number")
    root = math.isqrt(value) if isinstance(value, int) else 0
    return root if isinstance(value, int) and root * root == value else math.sqrt(value)


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > MAX_CHARS:
        raise ToolError(f"round takes a whole number of digits, at most {MAX_CHARS}")
    return round(value, digits) if digits > 0 else int(round(value, digits))


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}

_FUNCTIONS: dict[str, tuple[Callable[..., Number], int, int]] = {
    "abs": (abs, 1, 1),
    "min": (lambda *values: min(values), 1, MAX_CHARS),
    "max": (lambda *values: max(values), 1, MAX_CHARS),
    "round": (_round, 1, 2),
    "sqrt": (_sqrt, 1, 1),
}
"""Name → function, fewest and most numbers that it takes."""
