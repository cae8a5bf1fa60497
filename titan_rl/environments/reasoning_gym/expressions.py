"""Safe parser of model-written arithmetic: a few nodes of Python's grammar.

What is read becomes an exact fraction, or an expression of sympy's built node by node: no text of a model's reaches
``eval`` or sympy's own parser, which is one.
"""

import ast
import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sympy

_LEGAL = re.compile(r"[0-9A-Za-z+\-*/() ]+", re.ASCII)
_LONGEST = 400
"""Characters."""
_LARGEST = 10**12
"""Of a number as it is written."""
_LARGEST_EXPONENT = 64
_MOST_BITS = 4096
"""Of a number that a power makes."""
_FUNCTIONS = frozenset(
    {
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "sqrt"),
    }
)


class Unreadable(ValueError):
    """Text that is no such expression, or one too large."""


def read(text: str) -> ast.expr:
    """Parse an expression. Errors: Unreadable."""
    if len(text) > _LONGEST or not _LEGAL.fullmatch(text):
        raise Unreadable
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable from None


def numbers(node: ast.expr) -> list[int]:
    """Numbers in an expression."""
    return [_number(part) for part in ast.walk(node) if isinstance(part, ast.Constant)]


def _number(node: ast.Constant) -> int:
    if type(node.value) is not int or not 0 <= node.value <= _LARGEST:
        raise Unreadable
    return node.value


def value(node: ast.expr) -> Fraction:
    """Exact value of an expression of numbers and + - * /. Errors: Unreadable, ZeroDivisionError."""
    match node:
        case ast.Constant():
            return Fraction(_number(node))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return value(left) + value(right)
        case ast.BinOp(op=ast.Sub(), left=left, right=right):
            return value(left) - value(right)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return value(left) * value(right)
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            return value(left) / value(right)
    raise Unreadable


def symbolic(node: ast.expr, variables: Iterable[str]) -> "sympy.Expr":
    """Expression of sympy's, of numbers, these variables, pi, E, + - * / ** and functions of one argument.

    Errors: Unreadable.
    """
    import sympy

    names: dict[str, sympy.Expr] = {name: sympy.Symbol(name) for name in variables}
    names |= {"pi": sympy.pi, "E": sympy.E}
    return _symbolic(node, names)


def _symbolic(node: ast.expr, names: dict[str, "sympy.Expr"]) -> "sympy.Expr":
    import sympy

    match node:
        case ast.Constant():
            return sympy.Integer(_number(node))
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_symbolic(operand, names)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return getattr(sympy, name)(_symbolic(argument, names))
        case ast.BinOp(op=operator, left=left, right=right):
            return _joined(operator, _symbolic(left, names), _symbolic(right, names))
    raise Unreadable


def _joined(operator: ast.operator, left: "sympy.Expr", right: "sympy.Expr") -> "sympy.Expr":
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.Pow() if _is_small_power(left, right):
            return left**right
    raise Unreadable


def _is_small_power(base: "sympy.Expr", exponent: "sympy.Expr") -> bool:
    import sympy

    if base == sympy.E:
        return True
    if not isinstance(exponent, sympy.Rational) or max(abs(exponent.p), exponent.q) > _LARGEST_EXPONENT:
        return False
    bits = math.log2(max(abs(base.p), base.q, 2)) if isinstance(base, sympy.Rational) else 1
    return bits * abs(float(exponent)) <= _MOST_BITS
