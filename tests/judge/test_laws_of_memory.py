"""The laws of memory: they reach every function of the
contract, and no name of a parameter switches them off.
"""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import (
    STEPS,
    Implementation,
    UnusableImplementation,
    contract_functions,
    load,
    oracle,
)
from evictionary.spec_tests.judge.law import Law, load_laws
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.memory import arguments, helpers
from evictionary.spec_tests.memory.models import ALL_PAIRS, NOT_ASKED

FUNCTIONS = contract_functions()
LAWS = {name: law for name, law in load_laws().items() if law.path.startswith("memory/")}
OURS = {target: load(target) for target in ("reference", "optimized")}
CASE = Case(batch=2, num_kv_heads=2, group=2, num_queries=2)
# Of methods that came last, with a state, a tuple, a list, a mask or scores for an answer.
NEWER = (
    "quest.page_bounds",
    "kvzap.score",
    "cake.dispersion",
    "chunk_kv.choose",
    "compactor.score",
    "attention_matching.fit_values",
    "criticalkv.projected_norms",
    "duo_attention.select",
    "momentkv_bounded.attend",
    "kvzip.score",
)


def of_one(path: str, function: Callable[..., Any], **fields: Any) -> Implementation:
    """An implementation of one function."""
    stem, name = path.split(".")
    return Implementation("one", {stem: types.SimpleNamespace(**{name: function})}, "one", **fields)


def asked(impl: Implementation, part: str = "") -> dict[str, tuple[str, str]]:
    """What becomes of the laws of memory that apply, with two inputs each."""
    laws = [law for name, law in LAWS.items() if part in name and not law.missing(impl)[0]]
    return {law.name: outcome(law, impl, max_examples=2, seed=1, patience=9) for law in laws}


def law(part: str) -> Law:
    return next(each for name, each in LAWS.items() if part in name)


@pytest.mark.parametrize("path", FUNCTIONS)
def test_every_function_of_the_contract_is_reached(path: str) -> None:
    """Its own right code, without a DOMAIN and with one of a model, and that of `optimized`."""
    for target, ours in OURS.items():
        if path not in ours.functions() or (target == "optimized" and path in STEPS):
            continue
        stem, name = path.split(".")
        function = getattr(ours.modules[stem], name)
        for domain in (Domain(), Domain(head_dim=(64,))):
            one = of_one(path, function, array_library=ours.array_library, dtype=ours.dtype, domain=domain)
            reached = [each for each, *_ in helpers.answers(one, domain.fitted({"case": CASE})["case"])]
            assert reached == [path]
        one.domain = Domain()
        assert {*asked(one, "alone").values(), *asked(one, "own").values()} <= {("passed", "")}


def test_the_steps_are_named_by_no_law() -> None:
    named = {path for each in load_laws().values() for path in each.functions}
    assert not STEPS & named and {*FUNCTIONS} >= STEPS


def reusing(function: Callable[..., Any]) -> Callable[..., Any]:
    buffers: dict[Any, Any] = {}

    def lent(place: Any, answer: Any) -> Any:
        if isinstance(answer, tuple):
            entries = [lent((place, number), each) for number, each in enumerate(answer)]
            return type(answer)(*entries) if hasattr(answer, "_fields") else tuple(entries)
        buffer = buffers.setdefault((place, answer.shape), np.empty_like(answer))
        buffer[...] = answer
        return buffer

    return lambda *arrays, **settings: lent("", function(*arrays, **settings))


def seeding(function: Callable[..., Any]) -> Callable[..., Any]:
    def seeded(*arrays, **settings):
        np.random.seed(0)  # noqa: NPY002
        return function(*arrays, **settings)

    return seeded


def overwriting(function: Callable[..., Any]) -> Callable[..., Any]:
    def written(first, *others, **settings):
        answer = function(first, *others, **settings)
        first *= 2
        return answer

    return written


def odd(path: str, wrong: Callable[..., Any]) -> Callable[..., Any]:
    """The same with names of its own for what comes by place."""
    names = [
        each.name
        for each in arguments.signature_of(path).parameters.values()
        if each.kind is not each.KEYWORD_ONLY
    ]
    words = ", ".join(f"{name}_{place}" for place, name in enumerate(names))
    return eval(f"lambda {words}, **settings: wrong({words}, **settings)", {"wrong": wrong})


@pytest.mark.parametrize("path", NEWER)
@pytest.mark.parametrize("called", ["by star", "by odd names"])
def test_memory_is_judged_whatever_the_parameters_are_called(path: str, called: str) -> None:
    for mistake, requirement, part in (
        (reusing, "MEM-2", "of_their_own"),
        (seeding, "MEM-1", "generators"),
        (overwriting, "MEM-1", "left_alone"),
    ):
        wrong = mistake(oracle(path))
        one = of_one(path, wrong if called == "by star" else odd(path, wrong))
        found = {
            LAWS[name].requirement.id: said
            for name, (word, said) in asked(one, part).items()
            if word == "killed"
        }
        assert path in found[requirement], (mistake, found)
    right = oracle(path)
    answered = asked(of_one(path, odd(path, right)))
    silent = {name for name, (word, _) in answered.items() if word == "not asked"}
    of_sizes = {name for name in LAWS if "test_memory_sizes" in name}
    dear = {name for name in of_sizes if "hundreds_of_tokens" in name and path in ALL_PAIRS}
    assert silent == (of_sizes if path in NOT_ASKED else dear)
    assert {word for name, (word, _) in answered.items() if name not in silent} == {"passed"}


@pytest.mark.parametrize("path", ["quest.bounds", "keydiff.score", "kvzap.dms"])
def test_code_that_raises_fails(path: str) -> None:
    def broken(*arrays: Any, **settings: Any) -> Any:
        raise IndexError("list index out of range")

    assert set(asked(of_one(path, broken)).values()) == {
        ("killed", f"{path} raises IndexError: list index out of range")
    }


def as_of_old(budget: int, num_layers: int, *, beta: float = 20.0) -> list[int]:
    return oracle("pyramid_kv.budgets")(budget, num_layers, beta=beta)


def without_protection(s: np.ndarray, k: int) -> np.ndarray:
    return oracle("selection.top_k")(s, k)


def that_writes(s: np.ndarray, k: int) -> np.ndarray:
    kept = oracle("selection.top_k")(s, k)
    s[kept] = 0
    return kept


@pytest.mark.parametrize(
    ("path", "function"),
    [("pyramid_kv.budgets", as_of_old), ("selection.top_k", without_protection)],
    ids=["keyword", "place"],
)
@pytest.mark.parametrize("name", LAWS)
def test_what_has_a_default_need_not_be_taken(path: str, function: Callable[..., Any], name: str) -> None:
    """A right function without a setting of today's failed all of them: it was asked with the setting."""
    one, law = of_one(path, function), LAWS[name]
    assert law.not_for(one) or outcome(law, one, max_examples=5)[0] in ("passed", "not asked")


def test_what_is_not_taken_switches_no_law_off() -> None:
    law = LAWS["test_memory::test_inputs_are_left_alone"]
    assert outcome(law, of_one("selection.top_k", that_writes), max_examples=20)[0] == "killed"


def test_a_helper_that_has_the_name_of_a_step_is_left_alone() -> None:
    """Of this name there is a step that no law names: nobody has to have the same one."""
    for helper in (lambda states, epsilon: states, lambda states: np.multiply(states, 2, out=states)):
        assert {word for word, _ in asked(of_one("keydiff.unit", helper)).values()} == {"not asked"}


def test_what_is_degenerate_may_be_refused() -> None:
    def strict(keys: np.ndarray) -> np.ndarray:
        if not np.abs(keys).max(axis=-1).all():
            raise ValueError("keys: got a zero key")
        return oracle("keydiff.score")(keys)

    zeros = Case("zero_keys", 1, batch=1, num_kv_heads=1, length=17, head_dim=8)
    assert [*helpers.answers(of_one("keydiff.score", strict), Case(length=17))]
    with pytest.raises(Exception, match="degenerate"):
        [*helpers.answers(of_one("keydiff.score", strict), zeros)]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (
            "keydiff",
            "score(*, keys)",
            "got score(*, keys), wanted a function that can be called as score(keys)",
        ),
        ("lagkv", "score(keys, next_keys)", "called as score(keys, values, next_keys, next_values)"),
        ("lagkv", "select(k, v, ratio)", "called as select(keys, values, keep_ratio=...)"),
        ("keydiff", "score()", "got score(), wanted"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused_at_the_start(
    name: str, text: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(f"def {text}: ...")
    with pytest.raises(UnusableImplementation) as caught:
        load(str(tmp_path / f"{name}.py"))
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("keydiff", "def score(k): return k[..., 0]"),
        ("keydiff", "def score(*args): return args[0][..., 0]"),
        ("keydiff", "def score(keys, epsilon=1e-6): return keys[..., 0]"),
        (
            "rkv",
            "def score(q, k, *, window_size, kernel_size, importance_share, threshold): return k[..., 0]",
        ),
        ("lagkv", "def select(k, v, keep_ratio, **settings): return k[..., 0] > 0"),
        ("keydiff", "def unit(x, eps): return x\ndef score(k): return k[..., 0]"),
        ("keydiff", 'IMPLEMENTS = {"anchor": None}\ndef anchor(): ...\ndef score(k): return k[..., 0]'),
    ],
)
def test_a_signature_that_fits_in_its_own_way_is_taken(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    assert load(str(tmp_path / f"{name}.py")).functions()


@pytest.mark.parametrize(
    "name", sorted(name for name in LAWS if "two_to_the_31" in name or "strides" in name)
)
def test_a_law_of_memory_asks_inside_the_domain(name: str) -> None:
    """A kernel for 64 channels is asked at 64, and no law is left out because its own case has four."""
    kernel = load("optimized", domain=Domain.read({"head_dim": (64,), "group": (4,)}), methods=("keydiff",))
    assert outcome(LAWS[name], kernel, max_examples=3) == ("passed", "")


def beyond(size: int, axis: int) -> Callable[..., Any]:
    """The norms of keys, with zeros from a place of an axis on."""

    def wrong(keys: np.ndarray) -> np.ndarray:
        scores = oracle("knorm.score")(keys)
        scores[(slice(None),) * axis + (slice(size, None),)] = 0
        return scores

    return wrong


@pytest.mark.parametrize(
    ("function", "breaks"),
    [
        (beyond(8, axis=1), "test_kv_heads_of_models"),
        (beyond(4, axis=0), "test_batches_of_models"),
        (beyond(512, axis=2), "test_texts_of_hundreds_of_tokens"),
        (lambda keys: oracle("knorm.score")(keys[..., :128]), "test_channels_of_models"),
    ],
)
def test_a_law_of_sizes_tells_which_size_is_wrong(function: Callable[..., Any], breaks: str) -> None:
    found = asked(of_one("knorm.score", function), "test_memory_sizes")
    killed = {name.partition("::")[2]: said for name, (word, said) in found.items() if word == "killed"}
    assert {*killed} >= {breaks} and killed[breaks].startswith("knorm.score is wrong with ")
    assert {*killed} <= {breaks, "test_settings_of_papers_and_models"}


def test_laws_of_sizes_say_nothing_of_what_is_wrong_at_every_size() -> None:
    found = asked(of_one("knorm.score", lambda keys: 2 * oracle("knorm.score")(keys)), "test_memory_sizes")
    assert {word for word, _ in found.values()} == {"not asked"}


def test_what_is_refused_is_no_size_that_was_asked() -> None:
    """An input without heads is noted nowhere, and noting it raises nothing."""
    impl = load("reference")
    refusals = next(
        law for name, law in load_laws().items() if name.endswith("tova_score_refuses_what_does_not_fit")
    )
    assert refusals.check(impl) is None and impl.reach == {}
