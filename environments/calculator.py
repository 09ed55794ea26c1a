"""A tool: arithmetic on whole numbers, so that a model need not compute in its head."""

import ast
import operator
from collections.abc import Callable

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_LONGEST = 100
"""Characters of an expression."""


def calculate(expression: str) -> int:
    """Compute an expression of whole numbers with +, - and *, such as "12 * (3 + 4)".

    Args:
        expression: What to compute.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression is longer than {_LONGEST} characters")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("write whole numbers, +, -, * and brackets only")
