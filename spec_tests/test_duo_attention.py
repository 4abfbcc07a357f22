"""Laws of DuoAttention: DA-1 and DA-2."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from evictionary.reference.rope import rotate
from evictionary.spec_tests.harness.by_hand import causal_weights, require_equal
from evictionary.spec_tests.harness.cases import cases, long_cases, seeded_cases, seeds
from evictionary.spec_tests.harness.law import law
from evictionary.spec_tests.harness.tolerance import Allowance, Violation, require_mask

ESTIMATE, SELECT = "duo_attention.estimate_gates", "duo_attention.select"
sizes = st.integers(0, 6)


def gates_of(case, seed):
    """A gate in quarters for each head, [B, H_kv]: the same in every dtype."""
    return np.random.default_rng(seed).integers(0, 5, size=case.keys.shape[:2]) / 4


@law("DA-1", of=ESTIMATE, case=seeded_cases(kinds=("normal", "drift", "ties")), length=st.sampled_from([1, 2, 7, 33]))
def test_the_estimate_is_the_area_under_the_cumulated_attention(impl, case, length):
    """Mean query and mean key turned to each place, the attention of the last one, added up place by place."""
    query, key = impl.round(case.queries[:, :, 0]), impl.round(case.keys[:, :, 0])
    got = impl.duo_attention.estimate_gates(query, key, length=length)
    places, group = np.arange(length), query.shape[1] // key.shape[1]
    expected = np.zeros(key.shape[:2])
    for item, reader in np.ndindex(query.shape[:2]):
        keys = rotate(np.repeat(key[item, reader // group][None], length, axis=0), places)
        weights = causal_weights(rotate(query[item, reader][None], places[-1:]), keys)[0]
        expected[item, reader // group] += np.cumsum(weights).mean() / group
    error = 1e-11 * (1 + float(np.abs(query).max() * np.abs(key).max()) * case.head_dim * length)
    Allowance(expected, error, error).check(got, "the gates")


@law("DA-1", of=ESTIMATE)
def test_a_head_that_looks_everywhere_has_a_gate_above_one_half(impl):
    """A zero query gives 1/500 to each place: the cumulated attention rises to 1, and its mean is 501/1000."""
    got = impl.duo_attention.estimate_gates(np.zeros((1, 2, 2)), np.ones((1, 1, 2)))
    Allowance(np.array([[0.501]]), 1e-9, 1e-9).check(got, "the gate")


@law("DA-2", of=SELECT, case=cases(), seed=seeds(), sink_size=sizes, recent_size=st.integers(1, 6))
def test_retrieval_heads_keep_all_and_the_others_both_ends(impl, case, seed, sink_size, recent_size):
    """From the threshold on every token stays; below it the first and the last, and nothing between."""
    gates, length = gates_of(case, seed), case.keys.shape[2]
    kept = impl.duo_attention.select(case.keys, gates, sink_size=sink_size, recent_size=recent_size)
    require_mask(kept, case.keys.shape[:3], "the selection")
    ends = {*range(min(sink_size, length)), *range(max(0, length - recent_size), length)}
    for place in np.ndindex(gates.shape):
        wanted = set(range(length)) if gates[place] >= 0.5 else ends
        if set(np.flatnonzero(kept[place]).tolist()) != wanted:
            raise Violation(f"a head with the gate {gates[place]} keeps other tokens", sorted(wanted), kept[place])


@law("DA-2", of=SELECT, threshold=st.sampled_from([0.25, 0.5, 0.75]))
def test_a_gate_at_the_threshold_is_a_retrieval_head(impl, threshold):
    """Of the gates 1/4, 1/2 and 3/4 those from the threshold on keep five tokens, the others two."""
    gates = np.array([[0.25, 0.5, 0.75]])
    kept = impl.duo_attention.select(np.ones((1, 3, 5, 2)), gates, threshold=threshold, sink_size=1, recent_size=1)
    require_equal(kept.sum(axis=-1), np.where(gates >= threshold, 5, 2), "other heads keep everything")


@law("DA-2", of=SELECT)
def test_the_defaults_are_128_and_256_tokens(impl):
    """Of 500 tokens a streaming head keeps the first 128 and the last 256."""
    kept = impl.duo_attention.select(np.ones((1, 1, 500, 1)), np.array([[0.25]]))
    expected = [*range(128), *range(244, 500)]
    require_equal(np.flatnonzero(kept), expected, "other tokens are kept")


@law("DA-2", of=SELECT, kind="refusal", bad=st.sampled_from([("sink_size", -1), ("recent_size", 1.5), ("recent_size", -1)]))
def test_bad_sizes_are_refused(impl, bad):
    """Negative or broken sizes raise ValueError, and so do no tokens at all."""
    with impl.refuses(bad[0]):
        impl.duo_attention.select(np.ones((1, 1, 3, 2)), np.ones((1, 1)), **({"sink_size": 1, "recent_size": 1} | dict([bad])))
    with impl.refuses("recent_size"):
        impl.duo_attention.select(np.ones((1, 1, 3, 2)), np.ones((1, 1)), sink_size=0, recent_size=0)


@law("DA-2", of=SELECT, kind="refusal", shape=st.sampled_from([(1, 3), (2, 2), (2,), (1, 2, 1)]))
def test_gates_of_another_model_are_refused(impl, shape):
    """Gates of other heads or rows, or with other axes, raise ValueError."""
    with impl.refuses("gates"):
        impl.duo_attention.select(np.ones((1, 2, 3, 4)), np.ones(shape))


@law("DA-2", of=SELECT, examples=2, case=long_cases(kinds=("normal",), lengths=(65_537, 40_960), head_dims=(64,)))
def test_a_streaming_head_forgets_the_middle_of_a_long_prompt(impl, case):
    """Of tens of thousands of tokens 384 stay in the last head, which is a streaming one, and all in the others."""
    gates = np.where(np.arange(case.num_kv_heads) == case.num_kv_heads - 1, 0.25, 0.75)[None]
    kept = impl.duo_attention.select(case.keys, gates)
    require_mask(kept, case.keys.shape[:3], "the selection")
    expected = np.ones(kept.shape, dtype=bool)
    expected[0, -1, 128:-256] = False
    require_equal(kept, expected, "other tokens stay than both ends of a streaming head")
