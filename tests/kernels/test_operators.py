"""Operators: where torch traces, a function of `optimized` is one node, with the answer that it has alone."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools import python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from evictionary.optimized import keydiff, lagkv, momentkv, operators, selection
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import load
from evictionary.spec_tests.judge.libraries import to_numpy
from evictionary.spec_tests.memory.arguments import arguments_of
from evictionary.spec_tests.memory.helpers import as_called, natives_of, same_bits

ALL = load("optimized")
OF_THE_NUMBERS = {
    "cache.compress",
    "paging.gather_pages",
    "attention_matching.fit_bias",
    "attention_matching.fit_values",
    "chunk_kv.chunk_means",
    "quest.page_bounds",
    "quest.append",
    "quantisation.pack",
    "rerotation.compact",
}
"""Functions whose answer has an axis of which the arguments do not say the size."""
DTYPES = ("float16", "bfloat16", "float32", "float64")
KEYS = torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(0))


def drawn(path: str, dtype: str, seed: int = 0) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A function with arguments that it takes, by place and by name."""
    implementation = load("optimized", dtype=dtype)
    for each in range(seed, seed + 40):
        case = Case(seed=each, batch=2, num_kv_heads=2, length=17)
        found = arguments_of(implementation, path, case)
        if found is not None:
            stem, name = path.split(".")
            function = getattr(importlib.import_module(f"evictionary.optimized.{stem}"), name)
            return function, *as_called(path, natives_of(implementation, found))
    raise AssertionError(f"{path}: no arguments in 40 cases")


def tensors(answer: Any) -> list[torch.Tensor]:
    if isinstance(answer, tuple):
        return [leaf for each in answer for leaf in tensors(each)]
    return [answer]


@pytest.fixture(autouse=True)
def forgotten() -> None:
    torch._dynamo.reset()


def test_each_function_that_gives_tensors_is_an_operator() -> None:
    left = {path for path in ALL.functions() if path not in operators.MADE}
    assert left == {
        "cake.budgets", "pyramid_kv.budgets", "selection.budget",  # whole numbers of Python
        "lagkv.tokens_per_partition", "lagkv.retained_length", "lagkv.compression_ratio",
        "lagkv.keep_ratio_for", "lagkv.why_nothing_removed", "quantisation.quantised_tokens",
        "quantisation.kivi_bytes", "momentkv.decode_step",  # it is several answers, one of them a cache
        "momentkv.recover", "momentkv.merge", "dropkv.perturbation", "lagkv.variation_score",  # torch alone
    }  # fmt: skip


def test_to_import_a_function_loads_no_compiler() -> None:
    """It would take seconds, of every command and of every judge."""
    program = (
        "import sys; from evictionary.optimized import cake, momentkv; print('torch._dynamo' in sys.modules)"
    )
    assert python("-c", program).stdout.strip() == "False"


@pytest.mark.parametrize("path", sorted(operators.MADE))
def test_a_compiled_function_gives_the_same_bits_in_one_graph(path: str) -> None:
    function, given, named = drawn(path, "float32")
    plain = function(*given, **named)
    compiled = torch.compile(function, fullgraph=True, backend="eager")(*given, **named)
    assert type(compiled) is type(plain)
    assert same_bits(to_numpy(compiled), to_numpy(plain))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", sorted(operators.MADE))
def test_a_fake_answer_has_the_shape_and_the_dtype_of_the_true_one(path: str, dtype: str) -> None:
    function, given, named = drawn(path, dtype)
    true = tensors(function(*given, **named))
    bound = inspect.signature(function).bind(*given, **named)
    bound.apply_defaults()
    row = operators.flat(list(bound.arguments.values()))
    torch.library.opcheck(operators.MADE[path], row, test_utils=("test_schema", "test_faketensor"))
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(fake, value))
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    with mode:
        found = tensors(function(*map(fake, given), **{name: fake(value) for name, value in named.items()}))
    assert [each.dtype for each in found] == [each.dtype for each in true]
    if path not in OF_THE_NUMBERS:
        assert [each.shape for each in found] == [each.shape for each in true]


@pytest.mark.parametrize("path", sorted(set(operators.MADE) - {"rope.frequencies"}))  # it takes no tensor
def test_vmap_gives_what_each_entry_gives_alone(path: str) -> None:
    function, given, named = drawn(path, "float32")

    def of_tensors(change: Callable[[torch.Tensor], Any], other: Callable[[Any], Any]) -> Any:
        return tree_map(lambda each: change(each) if isinstance(each, torch.Tensor) else other(each), given)

    two = of_tensors(lambda each: torch.stack([each, each.flip(0)]), lambda each: each)
    in_dims = of_tensors(lambda each: 0, lambda each: None)
    entries = [of_tensors(lambda each, at=at: (each, each.flip(0))[at], lambda each: each) for at in (0, 1)]
    found = tensors(torch.vmap(lambda *values: function(*values, **named), in_dims=in_dims)(*two))
    for at, entry in enumerate(entries):
        for both, one in zip(found, tensors(function(*entry, **named)), strict=True):
            assert same_bits(to_numpy(both[at]), to_numpy(one))


def test_a_gradient_is_refused_by_name() -> None:
    compiled = torch.compile(keydiff.score, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"keydiff.score: got a tensor that requires a gradient, wanted none"):
        compiled(KEYS.clone().requires_grad_())
    with torch.no_grad():
        assert not compiled(KEYS.clone().requires_grad_()).requires_grad


def test_a_mask_has_no_gradient_to_refuse() -> None:
    def kept(scores: torch.Tensor) -> torch.Tensor:
        return selection.top_k(scores, 10)

    scores = keydiff.score(KEYS).requires_grad_()
    assert torch.equal(torch.compile(kept, fullgraph=True, backend="eager")(scores), kept(scores))


def test_what_a_graph_cannot_hold_says_so() -> None:
    def step(query: torch.Tensor, keys: torch.Tensor, moments: momentkv.Moments) -> Any:
        return momentkv.decode_step(query, query, query, keys, keys, moments, budget=10)

    query, moments = KEYS[:, :, 0], momentkv.no_moments(KEYS, KEYS)
    with pytest.raises(Exception, match=r"momentkv.decode_step gives what a graph cannot hold"):
        torch.compile(step, fullgraph=True, backend="eager")(query, KEYS, moments)
    apart = torch.compile(step, backend="eager")(query, KEYS, moments)
    assert same_bits(to_numpy(tuple(apart)), to_numpy(tuple(step(query, KEYS, moments))))


def test_an_exported_program_takes_prompts_of_any_length() -> None:
    class Compressing(torch.nn.Module):
        def forward(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kept = selection.top_k(keydiff.score(keys), 16)
            return kept, lagkv.score(keys, values, keys, values)

    length = torch.export.Dim("length", min=16, max=4096)
    shapes = {"keys": {2: length}, "values": {2: length}}
    program = torch.export.export(Compressing(), (KEYS, KEYS), dynamic_shapes=shapes)
    named = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"evictionary.keydiff_score.default", "evictionary.selection_top_k.default"} <= named
    longer = torch.randn(2, 3, 200, 16)
    for found, alone in zip(program.module()(longer, longer), Compressing()(longer, longer), strict=True):
        assert torch.equal(found, alone)


def test_arguments_that_do_not_fit_are_named_as_elsewhere() -> None:
    compiled = torch.compile(selection.top_k, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"budget: got -1, wanted"):
        compiled(keydiff.score(KEYS), -1)
    with pytest.raises(
        Exception, match=r"selection.top_k: got protected, scores, wanted scores, budget, protected"
    ):
        compiled(keydiff.score(KEYS))
