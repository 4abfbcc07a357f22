"""Laws of attention over a compressed cache: ATT-1 to ATT-4."""

from __future__ import annotations

import numpy as np

from reference import cache as reference_cache
from spec_tests.cases import seeded_cases, seeds
from spec_tests.law import law
from spec_tests.test_cache import draw_mask
from spec_tests.tolerance import Violation, require_numbers

CASES = seeded_cases(max_length=33)


def compressed(impl, case, kept):
    """The compressed cache of what the implementation sees: numbers rounded to its dtype."""
    return reference_cache.compress(impl.round(case.keys), impl.round(case.values), kept)


@law("ATT-1", of="attention.attend", case=CASES, seed=seeds())
def test_output_is_softmax_attention_over_the_kept_tokens(impl, case, seed):
    """Query head h attends, with scale 1/sqrt(D), over the kept tokens of KV head h // G, and over no other."""
    cache = compressed(impl, case, draw_mask(case.keys.shape[:3], seed))
    allowed = impl.allowance("attention.attend", case.queries, cache, pick=0)
    allowed.check(impl.attention.attend(case.queries, cache)[0], "the output")


@law("ATT-2", of="attention.attend", case=CASES, seed=seeds())
def test_log_sum_exp_is_that_of_the_scaled_logits(impl, case, seed):
    """The second result is log sum_t exp(q . k_t / sqrt(D)), natural logarithm; -inf for a head that keeps nothing."""
    cache = compressed(impl, case, draw_mask(case.keys.shape[:3], seed))
    allowed = impl.allowance("attention.attend", case.queries, cache, pick=1)
    allowed.check(impl.attention.attend(case.queries, cache)[1], "the log-sum-exp")


@law("ATT-3", of="attention.attend", case=CASES, seed=seeds())
def test_two_disjoint_caches_merge_exactly(impl, case, seed):
    """Outputs over the kept and over the evicted tokens, weighted by their log-sum-exp, give attention over all tokens."""
    kept = draw_mask(case.keys.shape[:3], seed)
    whole = compressed(impl, case, np.ones_like(kept))
    allowed = impl.allowance("attention.attend", case.queries, whole, pick=0)
    outputs, normalisers = zip(
        *(impl.attention.attend(case.queries, compressed(impl, case, mask)) for mask in (kept, ~kept)), strict=True
    )
    total = np.logaddexp(*normalisers)
    require_numbers(total, case.queries.shape[:3], "the merged log-sum-exp")
    merged = sum(np.exp(normaliser - total)[..., None] * output for normaliser, output in zip(normalisers, outputs, strict=True))
    # Both halves carry an error of their own, and the weight of each carries that of a log-sum-exp.
    spread = np.abs(case.values).max()
    slack = allowed.largest + spread * impl.allowance("attention.attend", case.queries, whole, pick=1).largest
    error = float(np.abs(merged - allowed.expected).max())
    if error > 3 * slack + 4 * np.finfo(np.float64).eps * spread:
        raise Violation(f"the merged output differs by {error:.3g} from attention over all tokens", allowed.expected, merged)


@law("ATT-4", of="attention.attend", case=CASES)
def test_large_logits_stay_finite(impl, case):
    """Logits of 1e4 neither overflow nor give NaN: the output stays within the range of the values."""
    kept = np.ones(case.keys.shape[:3], dtype=bool)
    size = np.sqrt(1e4 * np.sqrt(case.keys.shape[-1]))
    direction = case.queries / np.abs(case.queries).max()
    keys = case.keys / max(np.abs(case.keys).max(), 1e-300) * size
    cache = reference_cache.compress(impl.round(keys), impl.round(case.values), kept)
    output, _ = impl.attention.attend(impl.round(direction * size), cache)
    require_numbers(output, (*case.queries.shape[:3], case.values.shape[-1]), "the output")
    bound = np.abs(case.values).max()
    if np.abs(output).max() > bound * 1.01:
        raise Violation(f"an output of {np.abs(output).max():.3g} leaves the range of the values, {bound:.3g}", None, output)
