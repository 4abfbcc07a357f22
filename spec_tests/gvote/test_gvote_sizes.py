"""Laws of GVote on thousands of tokens and at far positions: GV-1, GV-A2, GV-A4, GV-A7, GV-A10, GV-A11."""

from evictionary.reference import rope
from evictionary.spec_tests.gvote.helpers import (
    SELECT,
    WEIGHTS,
    check_each_selection,
    check_nucleus,
    drawn_queries,
    first_of_each,
    mass_slack,
)
from evictionary.spec_tests.judge.prelude import *

NUCLEUS = "gvote.nucleus"


@law("GV-1", of=WEIGHTS, examples=2, case=long_cases(lengths=SPLIT_LENGTHS))
def test_weights_over_a_long_prompt_are_normalised_together(impl, case):
    """One softmax over all of thousands of tokens."""
    queries, keys = impl.round(case.queries[:, :, :1]), impl.round(case.keys)
    expected, slack = (each[:, :, 0] for each in attended(impl, queries, keys))
    got = impl.gvote.attention_weights(queries[:, :, 0], keys)
    near(got, expected, slack, "the weights over a long prompt")


def long_mass_slack(impl, length):
    """What the comparison of a mass with p may be wrong by where thousands of weights are added up: errors
    of both signs.
    """
    return mass_slack(impl, int(np.sqrt(length))) + rounding(impl, length)


@law(
    "GV-A2",
    of=NUCLEUS,
    examples=5,
    case=long_rows(("normal", "duplicate_keys", "ties")),
    percent=st.sampled_from([95, 50, 99]),
)
def test_the_nucleus_of_a_long_row_holds_p_and_not_a_token_more(impl, case, percent):
    """Of thousands of weights the largest, as many as reach p."""
    weights = row_of_weights(impl, case)
    slack = long_mass_slack(impl, case.length)
    check_nucleus(impl.gvote.nucleus(weights, percent / 100), weights, percent / 100, slack)


@law(
    "GV-A2",
    of=NUCLEUS,
    kind="edge",
    examples=5,
    case=long_rows(("duplicate_keys", "ties")),
    percent=st.sampled_from([95, 50, 99]),
)
def test_of_a_long_row_the_lower_of_equal_weights_are_in_the_nucleus(impl, case, percent):
    """Of thousands of weights, many equal, the nucleus is the first of a stable sort by falling weight."""
    weights = row_of_weights(impl, case)
    kept = impl.gvote.nucleus(weights, percent / 100)
    equal(
        kept,
        first_of_each(weights, kept.sum(axis=-1)),
        "of equal weights one at a higher position is in the nucleus",
    )


def row_of_weights(impl, case):
    """Weights of the order of 1, so that half precision
    holds them: mass is relative to the sum of the row.
    """
    return impl.round(np.exp(case.keys[..., 0] - case.keys[..., 0].max(axis=-1, keepdims=True)))


@law(
    "GV-A10",
    of="gvote.top_each",
    examples=5,
    case=long_rows(("ties", "one_bin", "normal", "minute")),
    budget=st.integers(1, 60_000),
)
def test_a_long_row_keeps_its_own_number(impl, case, budget):
    """Each of several rows of up to 131,072 tokens keeps
    b_h tokens, and none evicted scores more than one kept.
    """
    scores, budgets = long_scores(impl, case, budget)
    check_each_selection(impl.gvote.top_each(scores, budgets), scores, budgets)


@law(
    "GV-A10",
    of="gvote.top_each",
    kind="edge",
    examples=5,
    case=long_rows(("ties", "one_bin")),
    budget=st.integers(1, 60_000),
)
def test_a_long_row_keeps_the_lower_of_equal_scores(impl, case, budget):
    """Each of several rows of up to 131,072 tokens keeps the first b_h of a stable sort by falling score."""
    scores, budgets = long_scores(impl, case, budget)
    got = impl.gvote.top_each(scores, budgets)
    equal(got, first_of_each(scores, budgets), "a long row keeps other tokens than a stable sort")


def long_scores(impl, case, budget):
    """Scores of several rows, the last of them the first one's negatives, and their budgets."""
    scores = impl.round(np.concatenate([case.keys[..., 0], -case.keys[:, :1, :, 0]], axis=1))
    return scores, np.array([[budget, *[2048] * (scores.shape[1] - 1)]])


def voted(impl, query, keys, sampled, p):
    """Which tokens [1, H_kv, T] a sample votes for whatever the rounding of logits and of the nucleus, and
    which it may vote for.
    """
    (num_kv_heads, length), group = keys.shape[1:3], query.shape[1] // keys.shape[1]
    must, may = np.zeros((2, 1, num_kv_heads, length), dtype=bool)
    for reader in range(query.shape[1]):
        head = 0, reader // group
        mine, rows = query[0, reader : reader + 1], keys[head]
        weights = weights_in_parts(mine, rows)
        mass = np.cumsum(-np.sort(-weights[0]))
        slack = softmax_slack(impl, weights, logit_errors(impl, mine, rows)).sum() + rounding(impl, length)
        least, most = np.searchsorted(mass, p - slack) + 1, np.searchsorted(mass, p + slack) + 1
        logits = sampled[0, reader] @ rows.T / np.sqrt(rows.shape[-1])
        wrong = logit_errors(impl, sampled[0, reader], rows)
        for low, high in zip(logits - wrong, logits + wrong, strict=True):
            # How many others may score as much, and how many score more for sure.
            could = length - np.searchsorted(np.sort(high), low) - 1
            beaten = length - np.searchsorted(np.sort(low), high, side="right")
            must[head] |= could < least
            may[head] |= beaten < most
    return must, may


@law(
    "GV-A11",
    of=SELECT,
    examples=2,
    case=long_cases(
        ("normal", "moving_mean"), groups=(4, 1, 16), lengths=(4097, 8191, 4095), head_dims=(64, 128)
    ),
    p=st.sampled_from([0.95, 0.5]),
)
def test_samples_vote_over_a_long_prompt(impl, case, p):
    """Of thousands of tokens, each of the samples votes for its top B_0, which may be thousands."""
    query, sampled = drawn_queries(case, case.seed, 2)
    query, keys = query / 4, impl.round(case.keys)  # attention so flat that its nucleus is long
    kept = impl.gvote.select(query, keys, sampled, p=p)
    require_mask(kept, keys.shape[:3], "the selection")
    must, may = voted(impl, query, keys, sampled, p)
    what = "a token is evicted that is among the top B_0 of a sampled query"
    require(not (must & ~kept).any(), what, must, kept)
    what = "a token is kept that is among the top B_0 of no sampled query"
    require(not (kept & ~may).any(), what, may, kept)


@law("GV-A11", of=SELECT, examples=2, case=long_cases(lengths=(8193, 16_384), head_dims=(64, 128)))
def test_each_of_sixty_four_samples_votes(impl, case):
    """Each of 64 samples looks at 64 tokens of its own, and keeps them; they all together keep 64 times
    B_0 at most.
    """
    owner = np.arange(case.length) % (case.length // 64)
    samples = min(64, case.head_dim, case.length // 64)  # each of them looks along a channel of its own
    tokens = np.flatnonzero(owner < samples)
    keys = np.full((1, case.num_kv_heads, case.length, case.head_dim), -64.0)
    keys[:, :, tokens, owner[tokens]] = -2
    sampled = np.zeros((1, case.num_kv_heads, samples, case.head_dim))
    sampled[..., np.arange(samples), np.arange(samples)] = math.isqrt(case.head_dim)
    # The current query sees the tokens of the last sample, and with p = 1 - 1/128 its budget is all of these,
    # 64 or one more.
    budget = int(np.bincount(owner)[samples - 1])
    kept = impl.gvote.select(sampled[:, :, -1], keys, sampled, p=1 - 1 / 128)
    require_mask(kept, keys.shape[:3], "the selection")
    voted = np.isin(owner, np.flatnonzero(np.bincount(owner)[:samples] <= budget))
    require(kept[..., voted].all(), "a token is evicted that is among the top B_0 of a sample", voted, kept)
    require(
        (kept.sum(axis=-1) <= samples * budget).all(),
        "more tokens are kept than all samples vote for",
        samples * budget,
        kept.sum(axis=-1),
    )


@law("GV-A11", of=SELECT, examples=2, case=paper_cases(groups=(4, 1)), p=st.sampled_from([0.95, 0.5]))
def test_a_budget_of_a_hundred_thousand_is_kept(impl, case, p):
    """As below, of the 128K tokens that the longest prompts have."""
    check_every_other(impl, case, p)


@law(
    "GV-A11",
    of=SELECT,
    examples=3,
    case=long_cases(groups=(4, 1, 16), lengths=(8191, 4097)),
    p=st.sampled_from([0.95, 0.5]),
)
def test_a_budget_of_thousands_is_kept(impl, case, p):
    """Every other token has the same attention, the others none: B_0 is p of half the tokens, and each
    sample keeps so many.
    """
    check_every_other(impl, case, p)


@law(
    "GV-A11",
    of=SELECT,
    kind="edge",
    examples=2,
    case=paper_cases(groups=(4, 1)),
    p=st.sampled_from([0.95, 0.5]),
)
def test_the_first_of_a_hundred_thousand_equal_logits_get_the_votes(impl, case, p):
    """As above, and each sample keeps the first of the tokens that it sees alike."""
    kept, tokens, seen, low, high = every_other(impl, case, p)
    rank = np.minimum(tokens, np.where(seen, np.cumsum(seen, axis=1) - 1, tokens))
    require(
        not ((rank < low) & ~kept).any() and not (kept & (rank > high)).any(),
        "of equal logits others than the first get the votes",
        rank < low,
        kept,
    )


def check_every_other(impl, case, p):
    """Two samples see the same in all tokens, and in every other one: each keeps B_0 of those."""
    kept, _, seen, low, high = every_other(impl, case, p)
    require(
        ((kept & seen).sum(axis=1)[:, None] >= low).all(),
        "fewer tokens are kept than a sample has votes for",
        low,
        kept.sum(axis=1),
    )
    require(
        (kept.sum(axis=1)[:, None] <= 2 * high + 2).all()
        and ((kept & ~seen).sum(axis=1)[:, None] <= high + 1).all(),
        "more tokens are kept than the samples have votes for",
        2 * high,
        kept.sum(axis=1),
    )


def every_other(impl, case, p):
    """What is kept, [H, T], the tokens, which of them the second sample sees, and the least and the
    largest B_0, [H, 1].

    The first sample sees the same in all tokens, the second in every other one, and nothing in the others.
    """
    readers, tokens = (1, case.num_kv_heads * case.group), np.arange(case.length)
    seen = (tokens + np.arange(case.num_kv_heads)[:, None]) % 2 == 0
    # Exact products: the seen tokens have the same logit in every dtype.
    keys, query = np.full_like(case.keys, -64), np.zeros((*readers, case.head_dim))
    keys[0, ..., 0], query[..., 0] = np.where(seen, -2, -64), math.isqrt(case.head_dim)
    kept = impl.gvote.select(query, keys, np.stack([np.roll(query, 1, axis=-1), query], axis=2), p=p)
    require_mask(kept, keys.shape[:3], "the selection")
    slack = long_mass_slack(impl, case.length)
    count = seen.sum(axis=1)[:, None]
    return kept[0], tokens, seen, np.floor((p - slack) * count), np.ceil((p + slack) * count)


@law(
    "GV-A4",
    of="gvote.hidden_statistics",
    examples=2,
    # Without the four sinks these are the lengths of a last split of one token, which must not weigh as much
    # as a whole one.
    case=long_cases(
        ("moving_mean", "vast", "sinks", "minute"), lengths=tuple(length + 4 for length in SPLIT_LENGTHS)
    ),
)
def test_statistics_of_a_long_prompt_add_up_its_parts(impl, case):
    """Mean and variance over thousands of tokens, the
    four sinks skipped, though the mean moves along them.
    """
    states = of_dtype(impl, case.keys[:, 0])
    observed = states[:, 4:]
    mean = observed.mean(axis=1)
    squares = (np.square(part - mean).sum(axis=1) for part in np.array_split(observed, 7, axis=1))
    variance = sum(squares) / observed.shape[1]
    got, size = impl.gvote.hidden_statistics(states), np.sqrt(np.square(observed).mean(axis=1))
    rounds_to(impl, got[0], mean, "the mean of a long prompt", terms=case.length, size=size)
    rounds_to(impl, got[1], variance, "the variance of a long prompt", terms=case.length, size=size**2)


@law(
    "GV-A7",
    of="gvote.average_cos_sin",
    examples=10,
    head_dim=st.sampled_from([128, 64, 256]),
    position=st.sampled_from([131_072, 8192, 32_768, 65_535]),
    theta=st.sampled_from([10000.0, 500000.0]),
)
def test_far_positions_average_like_near_ones(impl, head_dim, position, theta):
    """Up to position 131,072 the means of cos and sin over
    512 positions are the closed form of the geometric sum.
    """
    frequency = rope.frequencies(head_dim, theta)
    shrinkage = np.sin(256 * frequency) / (512 * np.sin(frequency / 2))
    middle = frequency * (position + 255.5)
    got = impl.gvote.average_cos_sin(head_dim, position=position, theta=theta)
    for name, found, expected in zip(("cos", "sin"), got, (np.cos(middle), np.sin(middle)), strict=True):
        what = f"the mean {name} at a far position"
        rounds_to(impl, found, shrinkage * expected, what, angle=position + 512)
