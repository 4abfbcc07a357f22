"""The idea first: a method file opens with its score or its choice, and no function is mostly checks."""

import ast
import inspect
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from tools import refused

from evictionary.methods import catalogue
from evictionary.reference import checks
from evictionary.reference.answers import require_answer
from evictionary.reference.contract import (
    Setting,
    arguments,
    arrays,
    contract,
    contract_of,
    contracts,
    states,
)
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import ANY, Implementation, contract_functions, load, oracle
from evictionary.spec_tests.judge.law import MATHEMATICS, load_laws
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.memory.arguments import arguments_of

REFERENCE = Path(checks.__file__).parent
METHODS = sorted(
    path.stem for path in REFERENCE.glob("*.py") if "\nMETHOD = " in path.read_text(encoding="utf-8")
)
FIRST_SCREEN = 40
CHECKS = ("array", "arrays", "as_", "require_")
SIZES = [
    Case("normal", 1, batch=2, num_kv_heads=3, group=2, length=13, head_dim=8, value_dim=7, num_queries=5),
    Case("normal", 2, batch=4, num_kv_heads=5, group=3, length=23, head_dim=12, value_dim=9, num_queries=11),
    Case("normal", 3, batch=1, num_kv_heads=1, group=1, length=9, head_dim=4, value_dim=2, num_queries=3),
]
"""The axes of each differ, so that no axis passes for another; the last has one head."""


def functions(stem: str) -> list[ast.FunctionDef]:
    tree = ast.parse((REFERENCE / f"{stem}.py").read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def only_checks(statement: ast.stmt) -> bool:
    """Whether a statement refuses an argument, or converts it."""
    match statement:
        case ast.Raise():
            return True
        case ast.If():
            return isinstance(statement.body[-1], ast.Raise)
        case (
            ast.Expr(value=ast.Call(func=ast.Name(id=name)))
            | ast.Assign(value=ast.Call(func=ast.Name(id=name)))
        ):
            return name.startswith(CHECKS)
    return False


@pytest.mark.parametrize("stem", METHODS)
def test_a_method_file_opens_with_its_seam(stem: str) -> None:
    first = functions(stem)[0]
    assert first.name in ("score", "select") and first.lineno < FIRST_SCREEN


@pytest.mark.parametrize("stem", METHODS)
def test_at_least_half_of_a_function_is_mathematics(stem: str) -> None:
    for function in functions(stem):
        # The name of a line of the contract is neither.
        said = [
            each
            for each in (function.body[1:] if ast.get_docstring(function) is not None else function.body)
            if not isinstance(each, ast.Assign) or not isinstance(each.value, ast.Constant)
        ]
        checked = sum(map(only_checks, said))
        assert 2 * checked <= len(said), f"{function.name}: {checked} of {len(said)} statements only check"


def test_every_method_is_found_by_its_file() -> None:
    assert set(METHODS) <= set(catalogue.names())


@pytest.mark.parametrize("path", sorted(contracts()))
def test_a_line_of_the_contract_names_the_arguments_of_its_function(path: str) -> None:
    named = [argument.name for argument in arguments(path)]
    assert named == [name for name in inspect.signature(oracle(path)).parameters if name in named]


def taken(line: str, *given: object) -> dict[str, object]:
    """What a line makes of arrays and states in its order."""
    wanted = arguments(line)
    return arrays(wanted, dict(zip((each.name for each in wanted), given, strict=True)))


def test_a_setting_that_is_left_out_is_the_decimal_number_too() -> None:
    def share(p: Setting[float | Fraction, "[0, 1]"] = 0.29) -> Fraction | float:
        return p

    checked = contract(share)
    assert [checked(), checked(0.29), checked(p=Fraction(29, 100))] == [Fraction(29, 100)] * 3


def test_the_axes_of_an_error_are_those_of_the_contract() -> None:
    """It names the argument, the shape got, the axes wanted,
    the axis with its size, and where that was first seen.
    """
    keys, values = np.ones((1, 2, 3, 4)), np.ones((1, 2, 5, 4))
    message = r"values: got shape \(1, 2, 5, 4\), wanted \[B, H_kv, T, D_v\] with T = 3, as in keys"
    refused(lambda: taken("lagkv.select", keys, values), message, ValueError)


@pytest.mark.parametrize(
    ("line", "shapes", "message"),
    [
        ("a: T D", [(3,)], r"a: got shape \(3,\), wanted \[T, D\]$"),
        ("a: T D", [(1, 3, 2)], r"a: got shape \(1, 3, 2\), wanted \[T, D\]$"),
        ("a: ... T", [(0, 3)], "a: .* with no empty axis"),
        ("a: ... T, b: ... T", [(2, 3), (1, 3)], r"b: .* with \.\.\. = \(2,\), as in a"),
        ("a: * T, b: * T", [(2, 3), (4, 3)], r"b: .* leading axes that broadcast to \(2,\)"),
        ("a: B H_q, b: B H_kv", [(1, 3), (1, 2)], "a: .* with H_q a multiple of H_kv = 2, as in b"),
        ("a: M<=T, b: T", [(4,), (3,)], "a: .* with M<=T = 3, as in b"),
        ("a: D, b: D/2", [(4,), (4,)], "b: .* with D/2 = 2.0, as in a"),
        ("a: h d, b: h*d", [(2, 3), (5,)], r"b: .* with h\*d = 6, as in a"),
        ("a: D%2", [(3,)], "a: .* with D%2 = 0"),
    ],
)
def test_axes_that_do_not_fit_are_refused(line: str, shapes: list[tuple[int, ...]], message: str) -> None:
    refused(lambda: taken(line, *map(np.ones, shapes)), message, ValueError)


def test_axes_that_fit_are_taken() -> None:
    line = "a: * M<=T D%2, b: * T D, c: N>=0, d?: open T"
    taken(line, np.ones((2, 1, 3, 4)), np.ones((5, 3, 4)), np.ones(0), None)
    taken(line, np.ones((2, 4)), np.ones((3, 4)), np.ones(7), np.array([np.inf, 1, -np.inf]))


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("T", [1, np.nan], "NaN"),
        ("T", [1, np.inf], "infinite"),
        ("T", [True], "dtype bool"),
        ("T", [1j], "dtype complex"),
        ("open T", [np.nan], "NaN"),
        ("bool T", [1, 0], "boolean"),
        ("whole T", [1.5], "whole numbers"),
        ("whole T", [-1], "whole numbers"),
    ],
)
def test_numbers_of_another_kind_are_refused(kind: str, given: list[object], message: str) -> None:
    refused(lambda: taken(f"a: {kind}", np.array(given)), f"a: got .*{message}", ValueError)


def test_a_state_that_is_none_is_refused_by_the_names_of_its_fields() -> None:
    message = r"a: got tuple, wanted Moments\(count, key_sum, value_sum, value_key_sum\)"
    refused(lambda: taken("a: Moments ...", (1, 2)), message, ValueError)
    are_taken = {argument.kind for path in contracts() for argument in arguments(path)}
    assert set(states()) - are_taken == {"Recovered"}, "the one state that functions give, and none takes"


@pytest.mark.parametrize("path", contract_functions())
def test_an_answer_is_what_the_signature_says(path: str) -> None:
    """Its axes and its kind, for texts of two sizes whose axes all differ."""
    reference, asked = load("reference"), 0
    for case in SIZES:
        if given := arguments_of(reference, path, case):
            bound = inspect.signature(oracle(path)).bind(**given)
            bound.apply_defaults()
            require_answer(path, bound.arguments, oracle(path)(**given))
            asked += 1
    assert asked


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, law in load_laws().items()
        if law.kind == MATHEMATICS and not contracts().keys() | {ANY} >= set(law.functions)
    ],
)
def test_a_law_asks_a_step_what_its_signature_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is not checked may be written from its signature alone."""
    call = Implementation.call

    def reading(self: Implementation, path: str, *args: object, **kwargs: object) -> object:
        answer = call(self, path, *args, **kwargs)
        if path not in contracts():
            contract_of(path).read(*args, **kwargs)
        return answer

    monkeypatch.setattr(Implementation, "call", reading)
    assert outcome(load_laws()[name], load("reference"), max_examples=4)[0] in ("passed", "not asked")


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("keydiff.score", np.ones((2, 3, 12)), r"answer: got shape \(2, 3, 12\), wanted \[..., T\]"),
        ("keydiff.score", np.ones((2, 13)), r"answer: got shape \(2, 13\), wanted \[..., T\]"),
        ("keydiff.score", np.full((2, 3, 13), 1.5), r"answer: got 1.5 to 1.5, wanted numbers in \[-1, 1\]"),
        ("rope.frequencies", np.ones(8), r"answer: got shape \(8,\), wanted \[head_dim/2\]"),
        ("cake_theory.cascade", (np.ones((13, 13)), 3), "answer 1: got dtype float64, wanted a boolean mask"),
    ],
)
def test_another_answer_is_not(path: str, answer: object, message: str) -> None:
    given = arguments_of(load("reference"), path, SIZES[0])
    assert given
    with pytest.raises(ValueError, match=message):
        require_answer(path, given, answer)
