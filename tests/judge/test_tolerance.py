"""What counts as equal, tried on what must not: constants,
shuffled rows, NaN; and on what must: other correct arithmetics.
"""

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tools import refused

from evictionary.reference import attention, gvote, keydiff, lagkv, momentkv
from evictionary.spec_tests import judge
from evictionary.spec_tests.judge.arithmetic import EPSILON, Rounded, round_to
from evictionary.spec_tests.judge.cases import KINDS, Case
from evictionary.spec_tests.judge.compare import rounds_to, selects
from evictionary.spec_tests.judge.tolerance import Violation, allowance, forget
from evictionary.spec_tests.proof.planted import replaced

DTYPES = sorted(EPSILON)


def scores(kind: str, dtype: str):
    keys = round_to(Case(kind=kind, seed=3, batch=2, num_kv_heads=2, length=33, head_dim=8).keys, dtype)
    return keys, allowance(keydiff.score, keys, dtype=dtype)


WRONG = {
    "constant": lambda right: np.full_like(right, right.mean()),
    "zero": np.zeros_like,
    "shuffled": lambda right: right[..., ::-1].copy(),
    "rolled": lambda right: np.roll(right, 1, axis=-1),
    "one NaN": lambda right: np.where(np.arange(33) == 7, np.nan, right),
    "all NaN": lambda right: np.full_like(right, np.nan),
    "infinite": lambda right: np.full_like(right, np.inf),
    "wrong sign": np.negative,
    "wrong shape": lambda right: right[:1],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "mixed_norms", "outlier_channel", "drift"])
def test_wrong_outputs_fail_at_every_dtype(kind: str, dtype: str) -> None:
    _, allowed = scores(kind, dtype)
    for name, wrong in WRONG.items():
        refused(functools.partial(allowed.check, wrong(allowed.expected), name), "", Violation)
    allowed.check(allowed.expected)


@pytest.mark.parametrize("dtype", DTYPES)
# torch's normalize gives NaN in float16
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero_keys"])
def test_plain_torch_passes_at_every_dtype(kind: str, dtype: str) -> None:
    keys, allowed = scores(kind, dtype)
    assert np.isfinite(allowed.largest), "the dtype cannot hold this case: choose another scale"
    tensor = torch.tensor(keys).to(getattr(torch, dtype))
    plain = -torch.nn.functional.cosine_similarity(
        torch.nn.functional.normalize(tensor, dim=-1).mean(-2, keepdim=True), tensor, dim=-1
    )
    allowed.check(plain.double().numpy(), kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_nearest_rounding_is_that_of_torch(dtype: str) -> None:
    numbers = np.random.default_rng(0).normal(size=10_000) * 10.0 ** np.random.default_rng(1).integers(
        -4, 5, size=10_000
    )
    if dtype != "float64":
        # torch goes from float64 to a half through float32
        numbers = numbers.astype(np.float32).astype(np.float64)
    assert (
        round_to(numbers, dtype) == torch.tensor(numbers).to(getattr(torch, dtype)).double().numpy()
    ).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_sums_stay_exact_in_every_order(dtype: str) -> None:
    numbers = Rounded.of(np.array([1.0, -1, 0.5, 3]), dtype, np.random.default_rng(0))
    assert (float(numbers.sum()), float((numbers * numbers).sum())) == (3.5, 11.25)


def test_a_quotient_that_is_exact_by_luck_is_rounded() -> None:
    """A fifth of this sum of keys fits into float32; a fifth of the sum of the values, in another right
    form, does not.
    """
    total = np.array([707.2161865234375])
    assert (round_to(total / 5, "float32") == total / 5).all()
    assert (
        len({float((Rounded.of(total, "float32", np.random.default_rng(seed)) / 5)[0]) for seed in range(6)})
        > 1
    )


# half-precision numbers are summed in float32, these without error
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_cancelling_sum_scatters(dtype: str) -> None:
    numbers = round_to(np.array([1 / 3, 1 / 7, -1 / 3, -1 / 7]), dtype)
    assert (
        len({float(Rounded.of(numbers, dtype, np.random.default_rng(seed)).sum()) for seed in range(6)}) > 1
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda keys: np.where(keys > 0, keys, 0),
        lambda keys: np.concatenate([keys, keys]),
        lambda keys: keys.std(axis=-1),
        lambda keys: np.einsum("ij,kj->ik", keys, keys),
        lambda keys: lagkv.normalise(keys, keys),
    ],
    ids=["where", "concatenate", "std", "einsum", "normalise"],
)
def test_the_arithmetic_survives_numpy_functions(function: Callable[..., np.ndarray]) -> None:
    result = function(
        Rounded.of(np.random.default_rng(0).normal(size=(3, 4)), "float16", np.random.default_rng(0))
    )
    assert isinstance(result, Rounded) and result.dtype_name == "float16"


ROW, ENDLESS = [3.0, 1, 1, 0], [np.inf, -np.inf, -np.inf]


@pytest.mark.parametrize(
    ("kept", "row", "named"),
    [
        ([True, True, False, False], ROW, {}),
        ([True, False, True, False], ROW, {}),
        ([True, False, False, True], ROW, {"slack": 0.5}),
        ([True, True, False], ENDLESS, {}),
    ],
)
def test_selections_are_judged_by_scores_not_by_positions(
    kept: list[Any], row: list[float], named: dict[str, Any]
) -> None:
    selects(np.array([kept]), np.array([row]), 2, **named)


@pytest.mark.parametrize(
    ("kept", "row", "named", "said"),
    [
        ([True, False, False, True], ROW, {}, ""),
        ([True, True, True, False], ROW, {}, ""),
        ([False, True, True, False], ROW, {}, ""),
        ([1, 1, 0, 0], ROW, {}, ""),
        ([True, True, False, False], ROW, {"protected": np.array([[False, False, False, True]])}, ""),
        ([True, True, False], [np.inf, -np.inf, 1.0], {"slack": 0.1}, "inf more"),  # it passed once
        ([True, True, False], [np.inf, 0.0, 1.0], {"slack": 0.1}, "1 more"),
    ],
)
def test_wrong_selections_are_told(
    kept: list[Any], row: list[float], named: dict[str, Any], said: str
) -> None:
    refused(lambda: selects(np.array([kept]), np.array([row]), 2, **named), said, Violation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999, 1.001])
def test_few_runs_say_what_all_runs_say(dtype: str, share: float) -> None:
    """An error may be allowed before all runs are made, and is then allowed after them."""
    _, whole = scores("drift", dtype)
    largest, mean = share * whole.largest, share * whole.mean
    forget()
    _, fresh = scores("drift", dtype)
    assert fresh.covers(largest, mean) == (share <= 1)


def test_two_logarithms_of_ten_thousand_are_subtracted() -> None:
    """Half of the random runs round both alike and make no
    error: enough of them are made to meet one that does.
    """
    keys = np.array([[[[100.0078125], [100.015625]], [[100.0078125], [99.96875]]]])
    values = np.array([[[[0.0], [3.0]], [[2.0], [-1.0]]]])
    kept = np.array([[[True, False], [True, True]]])
    evicted = momentkv.Moments(
        np.array([[0, 1]]),
        np.array([[[0], [99.984375]]]),
        np.array([[[0], [-2.0]]]),
        np.array([[[[0]], [[-199.96875]]]]),
    )
    allowed = allowance(
        momentkv.attend, np.full((1, 2, 1), 100.0), keys, values, kept, evicted, dtype="float64"
    )
    weights = np.exp(100 * (np.array([100.0078125, 99.96875, 99.984375]) - 100.0078125))
    allowed.check(np.array([[[0], [weights @ [2, -1, -2] / weights.sum()]]]))


def test_a_weight_may_be_e_to_the_minus_700_where_it_underflows() -> None:
    """A sigmoid whose exponents are cut at 700, below which they overflow elsewhere, is right; a weight of
    1e-290 is an error.
    """
    evicted = momentkv.Moments(
        np.array([[1]]), np.array([[[1.0]]]), np.array([[[0.0]]]), np.array([[[[0.0]]]])
    )
    keys, values, kept = (
        np.array([[[[0.0], [1.0]]]]),
        np.array([[[[3.0], [0.0]]]]),
        np.array([[[True, False]]]),
    )
    allowed = allowance(
        momentkv.attend, np.full((1, 1, 1), 1e4), keys, values, kept, evicted, dtype="float64"
    )
    allowed.check(np.full((1, 1, 1), 3 * np.exp(-700)))
    refused(lambda: allowed.check(np.full((1, 1, 1), 1e-290)), "", Violation)


def test_a_mean_of_thousands_stays_in_the_range_of_float16() -> None:
    """The sum is 8,191,000, the mean 1,000: kernels divide a float32 sum, and a law that took it for
    infinite judged nobody.
    """
    # At random the mean moves by one part in 2^10, and to the next of the numbers of float16, half of 1/2
    # away.
    for generator, slack in ((None, 0), (np.random.default_rng(0), 2**-10 + 2**-12)):
        numbers = Rounded.of(np.full((2, 8191), 1000.0), "float16", generator)
        for mean in (numbers.mean(axis=-1), np.mean(numbers, axis=-1)):
            assert mean.dtype_name == "float16"
            np.testing.assert_allclose(mean.view(np.ndarray), 1000, rtol=slack)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_softmax_through_its_logarithm_is_right_at_large_logits(dtype: str) -> None:
    for seed in range(50):
        case = Case(seed=seed, length=33, head_dim=8)
        query, keys = round_to(100 * case.queries[:, :, 0], dtype), round_to(100 * case.keys, dtype)
        allowed = allowance(gvote.attention_weights, query, keys, dtype=dtype)
        logits = (keys.astype(dtype) @ query.astype(dtype)[..., None])[..., 0] / np.sqrt(np.array(8, dtype))
        top = logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits - (top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))).astype(
            np.float64
        )
        allowed.check(weights, "the weights")
        refused(
            functools.partial(allowed.check, 0.9 * weights, "weights that do not sum to one"), "", Violation
        )
    assert gvote.softmax is attention.softmax


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_is_rounded_as_often_as_a_law_says(dtype: str) -> None:
    """Twice at least for each rounding that it names, and never 400 times; what it allows beside is added."""
    impl, right = replaced("reference", {}, dtype=dtype), np.linspace(1, 2, 9)
    judged = functools.partial(rounds_to, impl, expected=right, what="a number", size=right)
    judged(right * (1 + 2 * EPSILON[dtype]))
    wrong = right * (1 - 400 * EPSILON[dtype])
    refused(functools.partial(judged, wrong), "a number differs by", Violation)
    for more in ({"roundings": 200}, {"beside": right - wrong}, {"angle": 2.0**40 * right}):
        judged(wrong, **more)


EPSILONS = {
    *("ACCUMULATOR", "EPSILON", "accumulating", "angle_error", "final_rounding", "finfo", "logit_errors"),
    *("output_slack", "rounding", "softmax_slack", "sum_errors"),
}


def is_law(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("law(")


LAWS = [
    (f"{path.stem}::{law.name}", law)
    for path in sorted(Path(judge.__file__).parents[1].glob("*/test_*.py"))
    for law in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(law, ast.FunctionDef) and any(map(is_law, law.decorator_list))
]


def epsilons(law: ast.AST) -> Iterator[str]:
    """What a law computes with an error: names of epsilons, parts of an allowance, tiny numbers."""
    for node in ast.walk(law):
        match node:
            case ast.Name(id=name) if name in EPSILONS:
                yield name
            case ast.Attribute(attr="errors" | "largest" | "wider" as name):
                yield name
            case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
                for part in (left, right):
                    text = ast.unparse(part)
                    if isinstance(part, ast.Constant) and isinstance(part.value, float) and part.value < 1e-5:
                        yield text
                    if text.startswith(("within(", "impl.allowance(", "allowance(")):
                        yield text


def test_the_body_of_a_law_computes_with_no_epsilon() -> None:
    """The verbs hold what a number may be wrong by, and functions that say where an error comes from."""
    assert len(LAWS) > 900
    assert {name: found for name, law in LAWS if (found := sorted(set(epsilons(law))))} == {}
    bad = ast.parse("near(got, 1 / x, 2 * rounding(impl) + 1e-12 + 3 * within(impl) + allowed.largest, what)")
    assert set(epsilons(bad)) == {"rounding", "1e-12", "within(impl)", "largest"}
