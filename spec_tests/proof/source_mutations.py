"""Small mistakes made by a program: the source of a function of `reference/` with one operator, number,
axis or call replaced.

What only refuses an argument gives no number and is left alone: `raise`, the `if` in front of it, the calls
in CHECKS, `contract`, and the bounds that the functions of `checks` are given. So are the defaults of
arguments, of which `papers/test_defaults.py` has a table.
"""

import ast
import importlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from evictionary.spec_tests.judge.implementation import STEMS, oracle
from evictionary.spec_tests.proof.planted import copied

# What stands for an operator or a comparison instead.
OPERATORS: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Div,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}

# What is called instead of a function.
RENAMED = {
    "mean": "sum",
    "sum": "mean",
    "max": "min",
    "min": "max",
    "std": "var",
    "floor": "ceil",
    "cos": "sin",
    "sin": "cos",
}

_DROPPED = """
abs append centre cosine cumsum delete exp expm1 floor log log_sum_exp logaddexp max maximum median min norm
repeat rotate softmax sort sqrt swapaxes triu unit where
"""
# Calls that are left out: each of their arguments stands in their place in turn, of `where` the condition
# excepted.
DROPPED = frozenset(_DROPPED.split())

ARGUMENTS_OF_CHECKS = {"low", "high", "closed_high"}
CHECKS = {"array", "arrays", "as_count", "as_odd", "require_between", "require_window"}


@dataclass(frozen=True)
class Mutation:
    """The function `of` (`keydiff.score`) with the line `was` replaced by `now`; `place` counts the equal
    ones before it.
    """

    of: str
    was: str
    now: str
    place: int
    code: types.CodeType

    def __str__(self) -> str:
        return f"{self.was}  ->  {self.now}" + f" ({self.place + 1})" * (self.place > 0)

    @property
    def function(self) -> Callable[..., Any]:
        """The mutated function; it calls what the right one calls."""
        right = oracle(self.of)
        scope = dict(inspect.unwrap(right).__globals__)
        exec(self.code, scope)
        return copied(right, inspect.unwrap(scope[right.__name__]).__code__)


def functions() -> list[str]:
    """Every function of the reference, helpers too, as `stem.function`."""
    modules = {
        stem: importlib.import_module(f"evictionary.reference.{stem}") for stem in STEMS if stem != "contract"
    }
    return [
        f"{stem}.{name}"
        for stem, module in modules.items()
        for name, member in vars(module).items()
        if isinstance(member, types.FunctionType) and member.__module__ == module.__name__
    ]


def mutations(path: str) -> list[Mutation]:
    """The mutations of one function, in the order of its source."""
    tree = ast.parse("from __future__ import annotations\n" + inspect.getsource(oracle(path)))
    found: list[Mutation] = []
    sources = {ast.unparse(tree)}
    for put, node, statement in _places(tree.body[-1], tree.body[-1]):
        was = _first_line(statement)
        for other in _alternatives(node):
            put(other)
            if (source := ast.unparse(tree)) not in sources:
                now = _first_line(other if node is statement else statement)
                place = sum((each.was, each.now) == (was, now) for each in found)
                with warnings.catch_warnings(action="ignore"):  # 1[..., 0] is a mistake too
                    code = compile(source, f"<{path}>", "exec")
                found.append(Mutation(path, was, now, place, code))
            sources.add(source)
            put(node)
    return found


def _first_line(statement: ast.AST) -> str:
    return ast.unparse(statement).splitlines()[0]


def _places(
    holder: ast.AST, statement: ast.AST
) -> Iterator[tuple[Callable[[ast.AST], None], ast.AST, ast.AST]]:
    """Every node below `holder` that may be replaced: how to
    put another in its place, the node, and its statement.
    """
    for field, value in ast.iter_fields(holder):
        if field in ("annotation", "returns", "args", "decorator_list") and isinstance(
            holder, ast.FunctionDef | ast.AnnAssign
        ):
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(node, ast.AST) or _only_refuses(node):
                continue

            def put(other: ast.AST, index: int = index, holder: ast.AST = holder, field: str = field) -> None:
                if isinstance(getattr(holder, field), list):
                    getattr(holder, field)[index] = other
                else:
                    setattr(holder, field, other)

            inside = node if isinstance(node, ast.stmt) else statement
            yield put, node, inside
            if not _is_number(node):
                yield from _places(node, inside)


def _only_refuses(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.Expr(value=ast.Constant()):
            return True
        case (
            ast.Expr(value=ast.Call(func=ast.Name(id=name)))
            | ast.Assign(value=ast.Call(func=ast.Name(id=name)))
        ):
            return name in CHECKS
        case ast.If():
            return isinstance(node.body[-1], ast.Raise)
        case ast.keyword():
            return node.arg in ARGUMENTS_OF_CHECKS
    return False


def _is_number(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _alternatives(node: ast.AST) -> list[ast.AST]:
    """What may stand in the place of a node."""
    if _is_number(node):
        value = ast.literal_eval(node)
        if isinstance(value, bool):
            return [ast.Constant(not value)]
        return (
            [ast.Constant(value + 1), ast.Constant(value - 1)]
            if isinstance(value, int)
            else [ast.Constant(value * 2)]
        )
    match node:
        case ast.operator() | ast.boolop() | ast.cmpop():
            return [other() for other in OPERATORS.get(type(node), ())]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
            return [left, right]
        case ast.BinOp(left=left, op=ast.Sub() | ast.Div() | ast.Pow()):
            return [left]
        case ast.UnaryOp(operand=operand):
            return [operand]
        case ast.BoolOp(values=values):
            return list(values)
        case ast.IfExp(body=body, orelse=orelse):
            return [body, orelse]
        case ast.Call():
            return _other_calls(node)
        case ast.Slice(lower=lower, upper=upper, step=step):
            later = [ast.Slice(_one_more(lower), upper, step)] if lower and not _is_number(lower) else []
            longer = [ast.Slice(lower, _one_more(upper), step)] if upper and not _is_number(upper) else []
            return [*later, *longer]
        case ast.If(test=test):
            return [ast.If(ast.UnaryOp(ast.Not(), test), node.body, node.orelse)]
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            again = any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(value))
            return [ast.Pass()] * again
        case ast.AugAssign() | ast.Assign(targets=[ast.Subscript()]):
            return [ast.Pass()]
    return []


def _other_calls(node: ast.Call) -> list[ast.AST]:
    called = node.func
    name = (
        called.attr
        if isinstance(called, ast.Attribute)
        else called.id
        if isinstance(called, ast.Name)
        else ""
    )
    others: list[ast.AST] = list(node.args[name == "where" :]) if name in DROPPED else []
    if name in RENAMED and isinstance(called, ast.Attribute):
        others.append(
            ast.Call(ast.Attribute(called.value, RENAMED[name], ast.Load()), node.args, node.keywords)
        )
    if name in ("range", "arange"):
        others += [
            ast.Call(called, [*node.args[:at], _one_more(bound), *node.args[at + 1 :]], node.keywords)
            for at, bound in enumerate(node.args)
            if not _is_number(bound)
        ]
    return others


def _one_more(bound: ast.expr) -> ast.expr:
    return ast.BinOp(bound, ast.Add(), ast.Constant(1))
