"""Laws of MomentKV: a decoding step (MK-A1) and the prompt (MK-P)."""

from evictionary.reference import momentkv
from evictionary.reference.momentkv import Moments
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.momentkv.helpers import (
    SCORE,
    SCORE_PROMPT,
    SELECT_PROMPT,
    attend_in_loops,
    check_prompt,
    moments_of,
    prompt,
    score_in_loops,
    scores_of_prompt,
    short_cases,
    situation,
    whole,
)

ATTEND, STEP = "momentkv.attend", "momentkv.decode_step"


def joined(states, new):
    """The states [B, H, T, D] of a cache and those of a new token [B, H, D]."""
    return np.concatenate([states, new[:, :, None]], axis=2)


def check_bookkeeping(impl, case, seed, budget):
    """Raise Violation unless a step on whole numbers leaves the budget and sums up the others, and attends
    with those sums.
    """
    query, keys, values, evicted = whole(case, seed)
    new = [np.clip(np.round(states[:, :, 0]), -2, 2) for states in (case.next_keys, case.next_values)]
    before = moments_of(keys, values, evicted)  # of other tokens with the same numbers
    output, left_keys, left_values, after = impl.momentkv.decode_step(
        query, *new, keys, values, before, budget
    )
    left, (all_keys, all_values) = min(keys.shape[2] + 1, budget), map(joined, (keys, values), new)
    require_numbers(left_keys, (*keys.shape[:2], left, keys.shape[-1]), "the keys left")
    gone = np.broadcast_to(keys.shape[2] + 1 - left, before.count.shape)
    equal(after[0] - before.count, gone, "the count did not grow by the tokens evicted")
    sums = (all_keys.sum(axis=2), all_values.sum(axis=2), np.swapaxes(all_values, -1, -2) @ all_keys)
    still = (left_keys.sum(axis=2), left_values.sum(axis=2), np.swapaxes(left_values, -1, -2) @ left_keys)
    for name, had, total, kept_part, now in zip(
        Moments._fields[1:], before[1:], sums, still, after[1:], strict=True
    ):
        equal(
            now + kept_part, had + total, f"{name}: what is retained and what is summed up are not all tokens"
        )
    for place in np.ndindex(keys.shape[:2]):
        rows = iter(np.hstack([all_keys[place], all_values[place]]).tolist())
        in_order = all(row in rows for row in np.hstack([left_keys[place], left_values[place]]).tolist())
        what = "the tokens left are not in position order, or a key lost its value"
        require(in_order, what, None, left_keys[place])
    fresh = Moments(np.asarray(after[0]).astype(np.int64), *after[1:])
    kept = np.ones(left_keys.shape[:3], dtype=bool)
    agrees(impl, ATTEND, query, left_keys, left_values, kept, fresh, got=output, also=attend_in_loops)


@law("MK-A1", of=STEP, case=short_cases, seed=seeds(), budget=st.integers(1, 20))
def test_a_step_ends_within_the_budget_and_attends_with_the_moments_of_its_end(impl, case, seed, budget):
    """min(T + 1, L) tokens are left, in order; the moments are the sums of the others; the output is that
    of these moments.
    """
    check_bookkeeping(impl, case, seed, budget)


@law("MK-A1", of=STEP, examples=1, seed=seeds(), over=st.sampled_from([0, 3]))
def test_steps_at_the_budgets_of_the_paper_lose_no_token(impl, seed, over):
    """The same at budgets of 64 to 1,024 tokens, of a batch of three; one token goes, or several."""
    for case in narrow(impl, seed, [budget + over for budget in BUDGETS]):
        check_bookkeeping(impl, case, seed, max(1, case.length - over))


def check_eviction(impl, case, seed):
    """Raise Violation unless a step over the budget by one evicts one token of each head, and none that
    stays scores less.
    """
    query, keys, values, moments = impl.rounded(situation(impl, case, seed))
    new = impl.rounded((case.next_keys[:, :, 0], case.next_values[:, :, 0]))
    all_keys, all_values = map(joined, (keys, values), new)
    expected = score_in_loops(query, all_keys, all_values, moments)
    slack = impl.allowance(SCORE, query, all_keys, all_values, moments).largest + 1e-12 * float(
        expected.max()
    )
    step = impl.momentkv.decode_step(query, *new, keys, values, moments, keys.shape[2])
    tokens, left = (np.concatenate(pair, axis=-1) for pair in ((all_keys, all_values), step[1:3]))
    require_numbers(left, (*keys.shape[:3], tokens.shape[-1]), "the tokens left")
    for place in np.ndindex(keys.shape[:2]):
        # The first row that differs is the evicted one, or one equal to it.
        different = np.flatnonzero((tokens[place][:-1] != left[place]).any(axis=-1))
        kept = np.arange(keys.shape[2] + 1) != (different[0] if different.size else keys.shape[2])
        equal(left[place], tokens[place][kept], "more than one token was changed or evicted")
        selects(kept, expected[place], keys.shape[2], slack=slack, what="the step")


@law("MK-A1", of=STEP, case=cases(kinds=KINDS), seed=seeds())
def test_a_step_evicts_the_lowest_score(impl, case, seed):
    """Over budget by one, each head evicts one token,
    the new one perhaps, and none that stays scores less.
    """
    check_eviction(impl, case, seed)


def values_left(impl, values, budget):
    """The values that a step leaves of tokens at equal attention, of which the last is the new one."""
    keys = np.zeros((*values.shape[:3], 2))
    empty, old = momentkv.no_moments(keys, values), (keys[:, :, :-1], values[:, :, :-1])
    return impl.momentkv.decode_step(keys[:, :, -1], keys[:, :, -1], values[:, :, -1], *old, empty, budget)[2]


@law("MK-A1", of=STEP, examples=1, seed=seeds())
def test_steps_at_the_budgets_of_the_paper_evict_the_lowest_score(impl, seed):
    """The same at budgets of 64 to 1,024 tokens, of a batch
    of three; of values alike but for one, that one goes.
    """
    for case in narrow(impl, seed):
        check_eviction(impl, case, seed)
        gone = np.random.default_rng(seed).integers(case.length + 1, size=case.keys.shape[:2])
        values = np.ones((*gone.shape, case.length + 1, case.value_dim))
        np.put_along_axis(values, gone[..., None, None], 0.25, axis=2)
        left = values_left(impl, values, case.length)
        equal(left, np.ones_like(case.values), f"a longer value went from a cache of {case.length} tokens")


@law("MK-A1", of=STEP)
def test_each_eviction_is_scored_anew(impl):
    """Of the values 1, 1.5, -1.25 at equal attention 1 goes
    first; then 1.5 is the nearer to its mean, and -1.25 stays.
    """
    values = np.array([[[[1.0], [1.5], [-1.25]]]])
    left = values_left(impl, values, 1)
    equal(left, values[:, :, 2:], "the second eviction does not follow from the moments after the first")


@law("MK-A1", of=STEP, kind="edge", signs=st.lists(st.sampled_from([1.0, -1.0]), min_size=2, max_size=6))
def test_of_equal_scores_the_earlier_token_stays(impl, signs):
    """Values 2 and -2 at equal attention, nothing evicted: all scores are equal, and the last token goes."""
    values = 2 * np.array(signs)[None, None, :, None]
    equal(
        values_left(impl, values, len(signs) - 1),
        values[:, :, :-1],
        "of equal scores the later token was kept",
    )


@law("MK-P", of=SCORE_PROMPT, case=cases(max_length=33), seed=seeds(), chunk=st.sampled_from([1, 2, 4, None]))
def test_the_prompt_score_is_causal_attention_times_the_norm_of_the_value(impl, case, seed, chunk):
    """alpha, causal within the window, is averaged over window and group; the products over each chunk, of
    4 unless told.
    """
    states, settings = prompt(case, seed), {} if chunk is None else {"chunk_size": chunk}
    expected, _ = scores_of_prompt(chunk or 4, *impl.rounded(states))
    agrees(impl, SCORE_PROMPT, *states, **settings, also=expected)


@law(
    "MK-P",
    of=SELECT_PROMPT,
    case=seeded_cases(min_length=5, max_length=33),
    seed=seeds(),
    spare=st.integers(0, 12),
    settings=st.sampled_from([{}, {"sink_size": 0}, {"sink_size": 3, "chunk_size": 2}, {"chunk_size": 1}]),
)
def test_the_prompt_keeps_its_first_token_and_its_window(impl, case, seed, spare, settings):
    """Exactly the budget is kept: the first token (or as many as asked), those of the window, and the best
    of the others.
    """
    check_prompt(impl, prompt(case, seed), lambda safe: safe + spare, **settings)


@law("MK-P", of=SELECT_PROMPT, examples=1, seed=seeds())
def test_prompts_at_the_budgets_of_the_paper_keep_their_best(impl, seed):
    """The same for a window of 32 tokens, chunks of 4 and
    budgets of 64 to 1,024, of prompts that are 67 tokens longer.
    """
    for case in narrow(impl, seed, [budget + 67 for budget in BUDGETS], group=2):
        check_prompt(impl, prompt(case, seed, 32), lambda safe, length=case.length: max(safe, length - 67))
