"""Safe checks for reasoning-gym families whose own scorers run the model's answer as Python.

Only a right answer pays. One that is text is compared as text; arithmetic is read (expressions.py) and worked out
exactly. Of an integral the derivative must be the integrand: sympy's scorer in reasoning-gym takes the unevaluated
``Integral(...)`` of the question itself, which is no answer here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from titan_rl.environments.reasoning_gym.expressions import Unreadable, numbers, read, symbolic, value

if TYPE_CHECKING:
    import sympy

Entry = dict[str, Any]
_POINTS = tuple(
    f"{number}/{over}" for number, over in ((37, 100), (59, 83), (113, 97), (-29, 71), (-131, 90), (211, 67))
)
"""Where a derivative and its integrand are compared, where both have a value: fractions that nobody writes."""
_FEWEST_POINTS = 2
_DIGITS = 60
_AGREEING_DIGITS = 40
_SMALLEST, _LARGEST = 1e-9, 1e9
"""Of a constant in an answer: what is smaller would be lost beside a right answer."""


def _text(entry: Entry, answer: str) -> bool:
    return answer == str(entry["answer"]).strip()


def _queens(entry: Entry, answer: str) -> bool:
    return answer in entry["metadata"]["valid_answers"]


def _makes(entry: Entry, answer: str, target: int) -> bool:
    """By all of the numbers, each once."""
    expression = read(answer)
    return sorted(numbers(expression)) == sorted(entry["metadata"]["numbers"]) and value(expression) == target


def _countdown(entry: Entry, answer: str) -> bool:
    return _makes(entry, answer, entry["metadata"]["target"])


def _puzzle24(entry: Entry, answer: str) -> bool:
    return _makes(entry, answer, 24)


def _product(entry: Entry, answer: str) -> bool:
    """Multiplied out, as the family's own answer is; the factors of the question are another expression."""
    variables = entry["metadata"]["variables"]
    return symbolic(read(answer), variables) == symbolic(read(entry["answer"]), variables)


def _antiderivative(entry: Entry, answer: str) -> bool:
    import sympy

    variable = entry["metadata"]["variable"]
    antiderivative = symbolic(read(answer), [variable, "C"])
    if not _has_plain_constants(antiderivative):
        return False
    integrand = symbolic(read(entry["metadata"]["integrand"]), [variable])
    return _is_zero(sympy.diff(antiderivative, sympy.Symbol(variable)) - integrand, variable)


def integrated(answer: str) -> str:
    """Evaluate an integral in the family's own answer, which is never a model's text."""
    import sympy

    return str(sympy.parse_expr(answer).doit()) if "Integral(" in answer else answer


def _has_plain_constants(expression: "sympy.Expr") -> bool:
    import sympy

    parts = (part for part in sympy.preorder_traversal(expression) if isinstance(part, sympy.Expr))
    constants = (part for part in parts if not part.free_symbols and part.is_number)
    return all(part == 0 or _SMALLEST <= abs(complex(part)) <= _LARGEST for part in constants)


def _is_zero(expression: "sympy.Expr", variable: str) -> bool:
    """At points where it has a value: an identity of analytic functions, to many digits."""
    import sympy

    if expression.free_symbols - {sympy.Symbol(variable)}:
        return False
    values = [expression.subs(sympy.Symbol(variable), sympy.Rational(point)).evalf(_DIGITS) for point in _POINTS]
    finite = [value for value in values if value.is_finite]
    return len(finite) >= _FEWEST_POINTS and all(abs(value) < 10**-_AGREEING_DIGITS for value in finite)


_RIGHT: dict[str, Callable[[Entry, str], bool]] = {
    "binary_matrix": _text,
    "countdown": _countdown,
    "intermediate_integration": _antiderivative,
    "n_queens": _queens,
    "polynomial_multiplication": _product,
    "puzzle24": _puzzle24,
    "simple_integration": _antiderivative,
    "spiral_matrix": _text,
    "string_insertion": _text,
}
RUNS_THE_ANSWER = frozenset(_RIGHT)


def checked_score(name: str, entry: Entry, answer: str) -> float:
    """Score of an answer: 1 if right, else 0."""
    try:
        return float(_RIGHT[name](entry, answer.strip()))
    except (Unreadable, ArithmeticError, ValueError, TypeError, AttributeError, RecursionError):
        return 0.0  # what cannot be read or has no value is not right
