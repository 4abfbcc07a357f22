"""Laws of MomentKV's prompt as its section 5.1 has it: the heads of a layer share the budget (MK-P2)."""

from __future__ import annotations

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from evictionary.spec_tests.harness.by_hand import causal_weights, for_each_reader, over_group, require_equal
from evictionary.spec_tests.harness.cases import seeded_cases, seeds
from evictionary.spec_tests.harness.law import law
from evictionary.spec_tests.harness.tolerance import Violation, check_selection, require_mask
from evictionary.spec_tests.test_ada_kv import shared_by_hand, without
from evictionary.spec_tests.test_momentkv import either_way
from evictionary.spec_tests.test_momentkv_steps import SCORE_PROMPT, SELECT_PROMPT, prompt, prompt_by_logarithms

no_sharing = without(SELECT_PROMPT, "floor_ratio")


@law(
    "MK-P2",
    of=SELECT_PROMPT,
    not_for=no_sharing,
    case=seeded_cases(min_length=5, max_length=33),
    seed=seeds(),
    spare=st.integers(0, 12),
    percent=st.sampled_from([0, 20, 50, 100]),
    settings=st.sampled_from([{}, {"sink_size": 3, "chunk_size": 2}]),
)
def test_heads_share_the_budget_and_each_keeps_its_first_token_and_its_window(impl, case, seed, spare, percent, settings):
    """The layer keeps H_kv * budget tokens; first token and window stay in every head, each beside its share of the rest."""
    queries, keys, values = prompt(case, seed)
    heads, length, chunk = keys.shape[1], keys.shape[2], settings.get("chunk_size", 4)
    place = np.arange(length)
    safe = (place < settings.get("sink_size", 1)) | (place >= length - queries.shape[2])
    budget = min(length, int(safe.sum()) + spare)
    allowed = either_way(impl, SCORE_PROMPT, prompt_by_logarithms, queries, keys, values, chunk_size=chunk)
    kept = impl.momentkv.select_prompt(queries, keys, values, budget, floor_ratio=percent / 100, **settings)
    require_mask(kept, keys.shape[:3], "the selection")
    if not kept[..., safe].all():
        raise Violation("the first token or a token of the window is evicted in some head", safe, kept)
    require_equal(kept.sum(axis=(1, 2)), heads * budget, "the heads of a layer keep another number of tokens than they share")
    share = int(safe.sum()) + percent * (budget - int(safe.sum())) // 100
    if (kept.sum(axis=-1) < share).any():
        raise Violation("a head keeps fewer tokens than what is protected and its share of the rest", share, kept.sum(axis=-1))
    queries, keys, values = (impl.round(array) for array in (queries, keys, values))
    scores = over_group(causal_weights(queries, for_each_reader(keys, queries)).mean(axis=2), heads) * np.linalg.norm(
        values, axis=-1
    )
    for start in range(0, length, chunk):
        scores[..., start : start + chunk] = scores[..., start : start + chunk].mean(axis=-1, keepdims=True)
    slack = 2 * allowed.largest + 1e-12 * float(scores.max())
    protected = np.broadcast_to(safe, kept.shape)
    check_selection(kept, scores, kept.sum(axis=-1), slack=slack, protected=protected)
    for item in range(len(kept)):
        best = scores[item][shared_by_hand(scores[item], budget, percent / 100, protected[item])].sum()
        if scores[item][kept[item]].sum() < best - 2 * slack * heads * budget:
            raise Violation("other shares of the budget hold more of the scores", best, scores[item][kept[item]].sum())


@law(
    "MK-P2",
    of=SELECT_PROMPT,
    not_for=no_sharing,
    big=st.integers(0, 1),
    ratio=st.sampled_from([(0.0, 4, 2), (0.5, 4, 2), (1.0, 3, 3)]),
)
def test_the_head_with_the_larger_values_gets_what_is_free(impl, big, ratio):
    """Six tokens at equal attention, two of them protected: of a budget of 3 a head, the larger values draw both free places."""
    floor_ratio, more, fewer = ratio
    values = np.ones((1, 2, 6, 2))
    values[:, big] *= 8
    kept = impl.momentkv.select_prompt(
        np.zeros((1, 2, 1, 2)), np.zeros((1, 2, 6, 2)), values, 3, chunk_size=1, floor_ratio=floor_ratio
    )
    require_mask(kept, (1, 2, 6), "the selection")
    expected = np.zeros((1, 2, 6), dtype=bool)
    expected[..., [0, 5]] = True
    expected[0, big, : more - 1] = expected[0, 1 - big, : fewer - 1] = True
    require_equal(kept, expected, "the heads share the free places otherwise")


@law("MK-P2", of=SELECT_PROMPT, kind="refusal", not_for=no_sharing, bad=st.sampled_from(["protected", "floor_ratio"]))
def test_a_shared_prompt_that_does_not_fit_is_refused(impl, bad):
    """A budget below the first token and the window, and a floor_ratio above 1, raise ValueError naming the argument."""
    assume(impl.reads_numbers or bad != "protected")
    states = np.ones((1, 2, 6, 2))
    with impl.refuses(bad):
        impl.momentkv.select_prompt(
            states[:, :, :2], states, states, 2 if bad == "protected" else 4, floor_ratio=1.5 if bad == "floor_ratio" else 0.2
        )
