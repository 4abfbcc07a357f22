"""Gradients of the functions of `optimized` that the contract does not name, beside MEM-9, the law of all
others; what is refused, and what costs nothing. `TRITON_INTERPRET=1` asks the same of the kernels.
"""

import importlib
import inspect
import os
import pkgutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from tools import refused

from evictionary import optimized
from evictionary.optimized import (
    attention,
    attention_matching,
    cake,
    cam,
    compactor,
    cpu,
    dropkv,
    expected_attention as ea,
    gradients,
    gvote,
    h2o,
    kernels,
    keydiff,
    knorm,
    kvzip,
    lagkv,
    momentkv as mk,
    paging,
    rkv,
    rope,
    selection,
    softmax,
    streaming_llm,
    triattention,
)
from evictionary.optimized.cache import compress
from evictionary.optimized.kernels import launching
from evictionary.optimized.states import CompressedCache, Moments, PagedCache
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import load
from evictionary.spec_tests.memory.arguments import arguments_of

# Of B, H_kv, T, D: two query heads read a KV head.
SIZES = {"keys": (2, 2, 9, 4), "values": (2, 2, 9, 4), "queries": (2, 4, 3, 4), "anchor": (2, 2, 4)}
KEPT = torch.rand(2, 2, 9, generator=torch.Generator().manual_seed(5)) < 0.6
NOTHING = ("checks", "gradients", "operators")
"""Files without a function that computes."""
# What has no floating numbers of its own, or writes into its arguments.
NO_ANSWER = """ada_kv.ranks cam.receivers cpu.are_safe cpu.blockwise cpu.headwise flash.serves gvote.highest
gvote.nucleus_sizes gvote.rising h2o.select_scored momentkv.step momentkv.step_trusted
paging.compact_in_place softmax.current softmax.of_model states.zero_moments"""

# Steps of the functions above and of a cache, which ask no question of their own.
PARTS = """ada_kv.leaving ada_kv.own_budget attention.add_sums attention.products attention.row_products
attention.rows_of_heads flash.attend momentkv.lowest momentkv.norms_across momentkv.predicting
momentkv_ragged.step_trusted quest.attend_pages quest.attend_trusted quest.bounds_trusted
quest.page_bounds_trusted"""


def inputs(*names: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Normal numbers of these names, of which a gradient is wanted."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(SIZES[name], generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name in names
    ]


def moments(keys: torch.Tensor, values: torch.Tensor) -> Moments:
    return mk.update(mk.no_moments(keys, values), keys, values, ~KEPT)


def replayed(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """The attention of a replay, whose keys are those of the text."""
    blocks = kvzip.replay_attention_in_blocks(keys, queries, keys[:, :, : queries.shape[2]])
    return torch.cat([weights for _, _, weights in blocks], dim=1)


def capped(keys: torch.Tensor, queries: torch.Tensor) -> Any:
    """Attention under a cap and beside a sink."""
    with softmax.of_model(softmax.Softmax(2.0, queries[:, :, 0, 0])):
        return attention.grouped_attention(queries, keys), h2o.score(queries, keys)


CALLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "attention.attend_trusted": (
        "keys values queries",
        lambda k, v, q: attention.attend_trusted(q, compress(k, v, KEPT)),
    ),
    "attention.grouped_attention": ("keys queries", lambda k, q: attention.grouped_attention(q, k)),
    "attention.grouped_logits": ("keys queries", lambda k, q: attention.grouped_logits(q, k)),
    "cam.stretches": (
        "keys",
        lambda k: cam.stretches(KEPT, k[..., 0].sigmoid(), 3)[0],
    ),
    "compactor.group_attention": (
        "keys queries",
        lambda k, q: compactor.group_attention(q, k[:, :, :3], chunk_size=2),
    ),
    "cpu.rescaled": (
        "keys",
        lambda k: cpu.rescaled("keys", k, k.dtype)[0] * cpu.rescaled("", k, k.dtype)[1][..., None],
    ),
    "dropkv.squares": ("keys values queries", lambda k, v, q: dropkv.squares(q, k, v)),
    "expected_attention.expected_logits": (
        "keys queries",
        lambda k, q: ea.expected_logits(k, q[:, :, 0], q.mT @ q),
    ),
    "expected_attention.statistics_of_blocks": (
        "keys",
        lambda k: ea.statistics_of_blocks(k.split(4, dim=2)),
    ),
    "expected_attention.unrotated_statistics": (
        "keys",
        lambda k: ea.unrotated_statistics(k, torch.arange(9)),
    ),
    "h2o.attend_and_score": ("keys values queries", lambda k, v, q: h2o.attend_and_score(q, k, v)),
    "h2o.received_attention": ("keys queries", lambda k, q: h2o.received_attention(q, k)),
    "keydiff.anchor_sum": ("keys", keydiff.anchor_sum),
    "keydiff.score_with_anchor": ("keys anchor", keydiff.score_with_anchor),
    "keydiff.update_anchor": (
        "anchor keys values",
        lambda a, k, v: keydiff.update_anchor(a, k, v),
    ),
    "kvzip.replay_attention_in_blocks": ("keys queries", replayed),
    "lagkv.compress": (
        "keys values",
        lambda k, v: lagkv.compress(k, v, keep_ratio=0.5, sink_size=1, lag_size=2)[:2],
    ),
    "lagkv.variation_score": ("keys values", lagkv.variation_score),
    "momentkv.compress_prompt": (
        "keys values",
        lambda k, v: [*(each := mk.compress_prompt(k, v, KEPT))[0][:2], *each[1][1:]],
    ),
    "momentkv.evicted_part": (
        "keys values anchor",
        lambda k, v, q: mk.evicted_part(q[:, :, None], moments(k, v)),
    ),
    "rope.turn": ("keys", lambda k: rope.turn(k, *torch.tensor([[0.6, 0.6], [0.8, 0.8]]).to(k))),
    "softmax.capped": ("keys queries", capped),
    "softmax.weights": ("keys", softmax.weights),
    "softmax.with_sink": ("keys", softmax.with_sink),
    "streaming_llm.compress": (
        "keys values",
        lambda k, v: streaming_llm.compress(k, v, budget=4, sink_size=1)[:2],
    ),
}


def functions() -> list[str]:
    """Every public function of `optimized`, as `stem.name`."""
    return [
        f"{stem}.{name}"
        for stem, is_folder in ((each.name, each.ispkg) for each in pkgutil.iter_modules(optimized.__path__))
        if not is_folder and stem not in NOTHING
        for name, value in vars(importlib.import_module(f"evictionary.optimized.{stem}")).items()
        if isinstance(value, FunctionType) and value.__module__ == f"evictionary.optimized.{stem}"
        if not name.startswith("_")
    ]


def test_every_function_is_asked() -> None:
    """By MEM-9 where its arguments can be drawn from the contract, and here otherwise."""
    implementation = load("evictionary.optimized")
    case = Case(batch=2, num_kv_heads=2, group=2, num_queries=2)
    by_law = {
        path for path in implementation.functions() if arguments_of(implementation, path, case) is not None
    } - {"lagkv.variation_score"}
    assert set(functions()) - by_law == {*CALLS, *NO_ANSWER.split(), *PARTS.split()}


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_carries_the_graph(name: str) -> None:
    """In float64 by finite differences; in float32, which the kernels take, by the gradient in float64."""
    names, call = CALLS[name]

    def answers(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = call(*given)
        return tuple(found) if isinstance(found, tuple | list) else (found,)

    exact = inputs(*names.split())
    assert torch.autograd.gradcheck(answers, exact)
    found = inputs(*names.split(), dtype=torch.float32)
    for given in (exact, found):
        sum((each * each).sum() for each in answers(*given)).backward()
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["keys", "values", "moments.key_sum"])
def test_what_writes_into_its_arguments_is_refused_before_it_writes(name: str) -> None:
    keys, values, query = (each.detach() for each in inputs("keys", "values", "queries"))
    given = {"keys": keys, "values": values, "moments": moments(keys, values)}
    argument, _, field = name.partition(".")
    (getattr(given[argument], field) if field else given[argument]).requires_grad_()
    before, positions = keys.clone(), torch.arange(9).repeat(2, 2, 1)
    call = lambda: mk.step(  # noqa: E731
        query[:, :, 0], keys[:, :, 0].detach(), values[:, :, 0].detach(), given["keys"], given["values"],
        positions, given["moments"], 9,
    )  # fmt: skip
    refused(call, f"{name}: got a tensor that requires a gradient, .* momentkv.step writes into", ValueError)
    assert torch.equal(keys, before)
    with torch.no_grad():
        assert call().isfinite().all()


def test_pages_are_compacted_in_place_without_a_gradient_alone() -> None:
    keys, values = (each.detach().transpose(1, 2).clone() for each in inputs("keys", "values"))
    lengths = torch.full((2, 2), 9)
    paged = PagedCache(
        keys.requires_grad_(), values, torch.arange(9)[None, :, None].repeat(2, 1, 2),
        torch.tensor([[0], [1]]), lengths, lengths[:, 0],
    )  # fmt: skip
    refused(
        lambda: paging.compact_in_place(paged, KEPT),
        "paged.keys: got a tensor that requires a gradient, .* paging.compact_in_place writes",
        ValueError,
    )


@pytest.mark.parametrize("stem", ["knorm", "momentkv", "selection"])
def test_a_kernel_past_the_gate_refuses_by_its_name(stem: str) -> None:
    """Whoever has kernels and hands them another tensor: no launcher detaches."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.importorskip("triton")
    keys, values = inputs("keys", "values", dtype=torch.float32)
    calls = {
        "knorm": (lambda: kernels.knorm.score(keys), "keys: .*knorm.score launches kernels"),
        "momentkv": (
            lambda: kernels.momentkv.update(moments(keys, values), keys.detach(), values.detach(), KEPT),
            "moments.key_sum: .*momentkv_prompt.update launches kernels",
        ),
        "selection": (
            lambda: kernels.selection.top_k(keys[..., 0], 3),
            "scores: .*selection.top_k launches kernels",
        ),
    }
    refused(*calls[stem], ValueError)


def test_the_gate_is_open_without_a_gradient_and_says_why_it_is_shut() -> None:
    """On a GPU. What is beside the tensors counts too."""
    keys, plain = Gpu(requires_grad=True), Gpu()
    with torch.no_grad():
        assert kernels.take("knorm", keys)
    assert kernels.take("knorm", plain, beside=(None, (plain, 3)))
    launching._warn_once.cache_clear()
    with pytest.warns(
        UserWarning, match=r"the knorm kernels: got tensors that require a gradient, .*no_grad"
    ):
        assert not kernels.take("knorm", keys)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernels.take("knorm", plain, beside=(None, (keys, 3)))


class Gpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    @staticmethod
    def __new__(cls, *, requires_grad: bool = False) -> "Gpu":
        return torch.Tensor._make_subclass(cls, torch.ones(1, 2, 3, 4), requires_grad)


@pytest.mark.parametrize("zeros", ["keys", "values"])
def test_zero_vectors_have_finite_gradients(zeros: str) -> None:
    """A norm has no slope at 0, and gives 0 for it; nothing divides by it."""
    keys, values, queries = inputs("keys", "values", "queries", dtype=torch.float32)
    with torch.no_grad():
        {"keys": keys, "values": values}[zeros][:, :, 2:4] = 0
    answers = [
        knorm.score(keys), keydiff.score(keys), keydiff.anchor(keys), rkv.redundancy(keys),
        triattention.score(keys, queries[:, :, 0].detach(), queries[:, :, 0, ::2].abs().detach()),
        lagkv.score(keys, values, keys, values),
        mk.score(queries[:, :, 0], keys, values, moments(keys, values)),
        mk.score_prompt(queries, keys, values),
        dropkv.score(queries, keys, values, window_size=2),
        compactor.leverage(keys), cam.probabilities(keys[..., 0].abs(), KEPT),
    ]  # fmt: skip
    sum(each.nan_to_num(posinf=0).sum() for each in answers).backward()
    assert keys.grad.isfinite().all() and values.grad.isfinite().all()


def test_attention_that_underflows_has_a_finite_gradient() -> None:
    keys, values, queries = inputs("keys", "values", "queries", dtype=torch.float32)
    answers = [
        cake.preference(queries * 200, keys, window_size=2),
        attention.attend(queries * 200, compress(keys, values, KEPT))[0],
        h2o.score(queries * 200, keys),
    ]
    sum(each.sum() for each in answers).backward()
    assert all(each.grad.isfinite().all() for each in (keys, values, queries))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_keys_of_a_head_without_tokens_have_a_gradient_of_zero(dtype: torch.dtype) -> None:
    keys, values, queries = inputs("keys", "values", "queries", dtype=dtype)
    kept = KEPT.clone()
    kept[0, 0] = False
    output, log_sum_exp = attention.attend(queries, compress(keys, values, kept))
    (output.float().sum() + log_sum_exp.masked_fill(log_sum_exp.isinf(), 0).sum()).backward()
    assert not keys.grad[0, 0].any() and keys.grad[0, 1].any()
    assert all(each.grad.isfinite().all() for each in (keys, values, queries))


def test_a_choice_is_made_without_a_graph() -> None:
    """It is the same with one as without, whatever it computes on the way."""
    keys, values, queries = inputs("keys", "values", "queries", dtype=torch.float32)
    choices = [
        lambda: selection.top_k(keys[..., 0], 3),
        lambda: h2o.select(queries, keys, budget=4),
        lambda: lagkv.select(keys, values, keep_ratio=0.5, sink_size=1, lag_size=2),
        lambda: gvote.select(queries[:, :, 0], keys, queries),
        lambda: attention_matching.select(keys, queries, budget=4),
        lambda: mk.select_prompt(queries, keys, values, 5),
    ]
    for choose in choices:
        with torch.no_grad():
            wanted = choose()
        assert torch.equal(choose(), wanted)


TAUGHT = [path.stem for path in (Path(kernels.__file__).parents[1] / "teaching").glob("[!_]*.py")]


@pytest.mark.parametrize("stem", sorted(TAUGHT))
def test_a_kernel_to_read_refuses_by_its_name_or_gives_a_mask(stem: str) -> None:
    """Every function of the contract that a teaching file has, by what the contract draws for it."""
    pytest.importorskip("triton")
    taught = load("evictionary.optimized.teaching")
    case = Case(batch=2, num_kv_heads=2, group=2, num_queries=2)
    for path in (each for each in taught.functions() if each.split(".")[0] == stem):
        given = arguments_of(taught, path, case)
        function = getattr(taught.modules[stem], path.split(".")[1])
        if given is None or "torch.no_grad" in inspect.getsource(function):
            continue
        natives = {name: taught.native(value) for name, value in given.items()}
        floats = [
            leaf
            for value in natives.values()
            for leaf in (value if isinstance(value, tuple) else (value,))
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        ]
        if stem == "streaming_llm":  # its scores are numbers of places, whatever the keys are
            continue
        if not floats:  # lengths and ratios alone
            continue
        floats[0].requires_grad_()
        refused(lambda: function(**natives), f"requires a gradient, .* {path} launches kernels", ValueError)  # noqa: B023


def test_a_tuple_of_the_caller_is_looked_into() -> None:
    keys, values = inputs("keys", "values")
    cache = compress(keys.detach(), values, KEPT)
    assert gradients.are_wanted(None, (3, [cache])) and not gradients.are_wanted(keys.detach(), None, 3.0)
    assert isinstance(cache, CompressedCache)
    with torch.inference_mode():
        assert not gradients.are_wanted(cache)
