"""Laws of MomentKV with hundreds and thousands of retained
and evicted tokens: MK-9, MK-10, MK-12, MK-23, MK-25, MK-P.
"""

from evictionary.reference.momentkv import Moments, Recovered, no_moments
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.momentkv.helpers import (
    ATTEND,
    PARTITION,
    SCORE,
    UPDATE,
    attend_in_loops,
    attends,
    held,
    moments_in_loops,
    recovers,
    score_in_loops,
    whole,
)

LONG_KINDS = ("normal", "moving_mean", "sinks")
GROUPS = (4, 16, 1)


def sums(keys, values, evicted):
    """The moments of the evicted tokens, part by part."""
    weights = evicted[..., None] * 1.0
    parts = in_parts(
        lambda k, v, gone: Moments(
            (gone[..., 0] > 0).sum(axis=-1),
            (k * gone).sum(axis=-2),
            (v * gone).sum(axis=-2),
            np.swapaxes(v * gone, -1, -2) @ k,
        ),
        keys,
        values,
        weights,
    )
    return Moments(*(sum(fields) for fields in zip(*parts, strict=True)))


def long_situation(impl, case, share):
    """Keys and values of a long prompt, a query, what of them
    is evicted, and its moments, as the dtype represents them.
    """
    query, keys, values = impl.rounded((case.queries[:, :, 0], case.keys, case.values))
    evicted = np.random.default_rng(case.seed).random(keys.shape[:3]) < share
    return query, keys, values, evicted, as_held(impl, sums(keys, values, evicted))


def as_held(impl, moments):
    """The moments as the dtype represents them, where it can hold them."""
    return impl.rounded(held(impl, moments))


def estimate(impl, queries, moments):
    """vbar + Stilde q / (n sqrt(d)) for queries [M, D] of one head, and what it may be wrong by: the sums
    that Stilde is of.
    """
    scale = float(moments.count) * np.sqrt(queries.shape[-1])
    outer = np.outer(moments.value_sum, moments.key_sum) / float(moments.count)
    mean = moments.value_sum / float(moments.count)
    magnitude = np.abs(mean) + np.abs(queries) @ (np.abs(moments.value_key_sum) + np.abs(outer)).T / scale
    slack = rounding(impl, queries.shape[-1]) * magnitude
    return mean + queries @ (moments.value_key_sum - outer).T / scale, slack


def looked_at(case):
    """Exact queries, keys and values: each query head looks at four tokens alike, three neighbours and one
    in the last quarter.

    Returns queries [1, H_q, D], keys, values, and the tokens of each query head [H_q, 4]. The values are 1 at
    the three, 8 at the fourth and 0 at all other tokens, which weigh nothing: a split that is lost or
    weighted alike changes the answer by a factor.
    """
    heads = case.num_kv_heads * case.group
    places = np.linspace(0, case.length - 1, 4 * heads).astype(int)
    tokens = np.concatenate([places[: 3 * heads].reshape(heads, 3), places[3 * heads :, None]], axis=1)
    readers = np.repeat(np.arange(heads), 4)
    queries, keys = looking(case, readers, tokens.ravel())
    values = np.zeros((*keys.shape[:3], case.value_dim))
    values[0, readers // case.group, tokens.ravel()] = np.tile([1, 1, 1, 8], heads)[:, None]
    return queries, keys, values, tokens


def unseen(impl, keys, values, tokens):
    """Some of the tokens that no head looks at, as evicted, and their moments: few enough for the sums to
    fit into float16.
    """
    places = np.arange(keys.shape[2])
    evicted = np.broadcast_to((places % 128 == 1) & ~np.isin(places, tokens), keys.shape[:3])
    return evicted, as_held(impl, sums(keys, values, evicted))


@law("MK-12", of=ATTEND, examples=2, case=long_cases(groups=GROUPS, lengths=SPLIT_LENGTHS))
def test_no_split_of_the_retained_tokens_is_lost(impl, case):
    """Each query head looks at three tokens of value 1 and at one of value 8, in other splits: the output
    is their mean.
    """
    for each in (case, *narrow(impl, case.seed, batch=1)):
        queries, keys, values, tokens = looked_at(each)
        evicted, moments = unseen(impl, keys, values, tokens)
        expected = np.full((*queries.shape[:2], each.value_dim), 11 / 4)
        got = impl.momentkv.attend(queries, keys, values, ~evicted, moments)
        rounds_to(impl, got, expected, f"the output over a cache of {each.length} tokens", size=expected)


@law("MK-10", of=SCORE, examples=2, case=long_cases(groups=GROUPS, lengths=SPLIT_LENGTHS))
def test_no_split_of_a_long_cache_is_scored_apart(impl, case):
    """Each query head shares its weight among four tokens in several splits; the moments explain no value."""
    for each in (case, *narrow(impl, case.seed, batch=1)):
        queries, keys, values, tokens = looked_at(each)
        _, moments = unseen(impl, keys, values, tokens)
        expected = np.zeros(keys.shape[:3])
        expected[0, np.arange(len(tokens))[:, None] // each.group, tokens] = 1 / (4 * each.group)
        expected *= np.linalg.norm(values, axis=-1)
        got, size = impl.momentkv.score(queries, keys, values, moments), expected + expected.max() / 2000
        what, terms = f"the score of a cache of {each.length} tokens", each.value_dim
        rounds_to(impl, got, expected, what, terms=terms, size=size)


def mixed_in_parts(impl, query, keys, values, kept, moments):
    """The retained part, added up part by part, mixed with the estimate of the evicted tokens, and what this
    may be wrong by.

    Both have their errors, and their shares that of the logarithms they are computed from.
    """
    expected, slack = np.zeros((2, *query.shape[:2], values.shape[-1]))
    group = query.shape[1] // keys.shape[1]
    for head in range(keys.shape[1]):
        readers = slice(head * group, (head + 1) * group)
        queries, of_head = query[0, readers], Moments(*(field[0, head] for field in moments))
        states = keys[0, head, kept[0, head]], values[0, head, kept[0, head]]
        retained, log_retained = attention_in_parts(queries, *states)
        evicted, of_estimate = estimate(impl, queries, of_head)
        mean_key = of_head.key_sum / float(of_head.count)
        log_evicted = np.log(of_head.count) + queries @ mean_key / np.sqrt(keys.shape[-1])
        share = 1 / (1 + np.exp(log_evicted - log_retained))[:, None]
        expected[0, readers] = share * retained + (1 - share) * evicted
        errors = logit_errors(impl, queries, np.concatenate([states[0], mean_key[None]]))
        of_logs = (weights_in_parts(queries, states[0]) * errors[:, :-1]).sum(axis=-1) + errors[:, -1]
        of_share = share * (1 - share) * np.expm1(of_logs + rounding(impl, keys.shape[2]))[:, None]
        slack[0, readers] = share * output_slack(impl, queries, *states)
        slack[0, readers] += of_share * np.abs(retained - evicted) + (1 - share) * of_estimate
    return expected, slack


@law("MK-12", of=ATTEND, examples=2, case=long_cases(LONG_KINDS, groups=GROUPS, lengths=SPLIT_LENGTHS))
def test_thousands_of_tokens_and_their_moments_mix(impl, case):
    """The retained part is added up from parts of thousands
    of tokens, the estimate of the evicted ones joins it.
    """
    query, keys, values, evicted, moments = long_situation(impl, case, 0.4)
    expected, slack = mixed_in_parts(impl, query, keys, values, ~evicted, moments)
    got = impl.momentkv.attend(query, keys, values, ~evicted, moments)
    near(got, expected, slack, "the output over a long cache")


def moments_in_parts(impl, keys, values, evicted):
    """The moments of the evicted tokens, part by part, and what each may be wrong by: the count by none."""
    expected = held(impl, sums(keys, values, evicted))
    squares, sizes = (sums(power(keys), power(values), evicted) for power in (np.square, np.abs))
    of_terms = list(zip(expected, squares, sizes, strict=True))[1:]
    return expected, (0.0, *(sum_errors(impl, keys.shape[2], *each) for each in of_terms))


@law("MK-25", of=UPDATE, examples=2, case=long_cases(LONG_KINDS))
def test_moments_of_thousands_of_evicted_tokens_are_their_sums(impl, case):
    """Count and sums over tens of thousands of evicted tokens are those of parts, added."""
    keys, values = impl.round(case.keys), impl.round(case.values)
    evicted = np.random.default_rng(case.seed).random(keys.shape[:3]) < 0.95
    expected, slack = moments_in_parts(impl, keys, values, evicted)
    got = impl.momentkv.update(no_moments(keys, values), keys, values, evicted)
    for name, field, wanted, wrong in zip(Moments._fields, got, expected, slack, strict=True):
        near(field, wanted, wrong, f"{name} of many tokens")


@law("MK-25", of=UPDATE, examples=2, case=long_cases(lengths=(16_384, 65_536, 8_192)))
def test_sums_of_thousands_that_cancel_are_exact(impl, case):
    """Keys of 16 and of -16 cancel, and one that is larger by 1 is left: a sum in float32 is exact, in
    half precision none is.
    """
    tokens = np.arange(case.length // 4 * 4)
    keys = np.zeros((1, case.num_kv_heads, case.length, case.head_dim))
    values, evicted = np.zeros((*keys.shape[:3], case.value_dim)), np.zeros(keys.shape[:3], dtype=bool)
    keys[:, :, tokens] = np.where(tokens < len(tokens) // 2, 16, -16)[:, None]
    keys[:, :, 2 * (case.seed % (len(tokens) // 2))] += 1
    values[:, :, tokens], evicted[:, :, tokens] = (1 - 2 * (tokens % 2))[:, None], True
    got = impl.momentkv.update(no_moments(keys, values), keys, values, evicted)
    equal(got[0], np.full(keys.shape[:2], float(len(tokens))), "the count of the evicted tokens is wrong")
    for name, field, wanted in zip(Moments._fields[1:], got[1:], (1.0, 0.0, 1.0), strict=True):
        rounds_to(impl, field, np.full(np.shape(field), wanted), f"{name} of tokens that cancel")


def scores_in_parts(impl, query, keys, values, moments):
    """The attention of a group on each token, its softmax part by part, times what the moments leave of the
    value, and what this may be wrong by.
    """
    expected, slack = np.zeros((2, *keys.shape[:3]))
    for head, queries in enumerate(query[0].reshape(keys.shape[1], -1, keys.shape[-1])):
        weights = weights_in_parts(queries, keys[0, head])
        alpha = weights.mean(axis=0)
        of_alpha = softmax_slack(impl, weights, logit_errors(impl, queries, keys[0, head])).mean(axis=0)
        of_head = Moments(*(field[0, head] for field in moments))
        explained, of_estimate = estimate(impl, keys[0, head], of_head)
        unexplained = np.linalg.norm(values[0, head] - explained, axis=-1)
        wrong = np.linalg.norm(of_estimate + rounding(impl) * np.abs(values[0, head]), axis=-1)
        of_norm = wrong + rounding(impl, values.shape[-1]) * unexplained
        expected[0, head] = alpha * unexplained
        slack[0, head] = of_alpha * (unexplained + wrong) + alpha * of_norm
    return expected, slack


@law("MK-10", of=SCORE, examples=2, case=long_cases(LONG_KINDS, groups=GROUPS, lengths=SPLIT_LENGTHS))
def test_thousands_of_retained_tokens_are_scored_together(impl, case):
    """alpha is one softmax over all retained tokens, and each is weighted by what the moments leave
    unexplained of its value.
    """
    query, keys, values, _, moments = long_situation(impl, case, 0.4)
    expected, slack = scores_in_parts(impl, query, keys, values, moments)
    near(impl.momentkv.score(query, keys, values, moments), expected, slack, "the score of a long cache")


def scores_of_chunks(impl, queries, keys, values):
    """The mean attention of a window times |v|, averaged over chunks of 4, and what it may be wrong by."""
    chunk = np.arange(keys.shape[2]) // 4

    def of_chunks(weights):
        each = over_group(weights.mean(axis=2), keys.shape[1]) * np.linalg.norm(values, axis=-1)
        return np.array([[(np.bincount(chunk, head) / np.bincount(chunk))[chunk] for head in each[0]]])

    expected, slack = map(of_chunks, attended(impl, queries, keys))
    return expected, slack + rounding(impl, values.shape[-1]) * expected


@law(
    "MK-P",
    of="momentkv.score_prompt",
    examples=2,
    case=long_cases(LONG_KINDS, groups=(4, 1), lengths=(8191, 4097, 4095)),
)
def test_chunks_of_a_long_prompt_score_by_the_window(impl, case):
    """Over thousands of tokens: the mean attention of a window of 32 queries times |v|, averaged over
    chunks of 4.
    """
    shape = (1, case.group * case.num_kv_heads, 32, case.head_dim)
    queries = impl.round(np.random.default_rng(case.seed).normal(size=shape))
    keys, values = impl.round(case.keys), impl.round(case.values)
    expected, slack = scores_of_chunks(impl, queries, keys, values)
    near(impl.momentkv.score_prompt(queries, keys, values), expected, slack, "the score of a long prompt")


def exact_states(case):
    """Queries, keys and values of whole numbers, some of them evicted, and their moments."""
    query, keys, values, evicted = whole(case, case.seed)
    return query, keys, values, evicted, moments_in_loops(keys, values, evicted)


@law("MK-25", of=UPDATE, examples=1, seed=seeds())
def test_moments_at_the_budgets_of_the_paper_are_their_sums(impl, seed):
    """Of 64 to 1,024 tokens of whole numbers, of a batch of
    three: the four sums, exactly, also on top of others.
    """
    for case in narrow(impl, seed):
        _, keys, values, evicted, expected = exact_states(case)
        for before in (no_moments(keys, values), as_held(impl, expected)):
            got = impl.momentkv.update(before, keys, values, evicted)
            for name, field, had, own in zip(Moments._fields, got, before, expected, strict=True):
                equal(field, had + own, f"{name} of {case.length} tokens is not their sum")


@law("MK-23", of="momentkv.recover", examples=1, seed=seeds())
def test_means_and_covariance_at_the_budgets_of_the_paper(impl, seed):
    """Of 64 to 1,024 tokens: the two means, and the sum of v (k - kbar)^T, token by token."""
    for case in narrow(impl, seed):
        _, keys, values, evicted, moments = exact_states(case)
        expected = [np.zeros(field.shape) for field in moments[1:]]
        for place in map(tuple, np.argwhere(evicted.any(axis=-1))):
            k, v = keys[place][evicted[place]], values[place][evicted[place]]
            found = k.mean(axis=0), v.mean(axis=0), v.T @ (k - k.mean(axis=0))
            for field, of_head in zip(expected, found, strict=True):
                field[place] = of_head
        for pick, by_hand in enumerate(expected):
            recovers(impl, moments, pick, also=by_hand, what=Recovered._fields[pick])


@law("MK-10", of=SCORE, examples=1, seed=seeds())
def test_the_score_at_the_budgets_of_the_paper_equals_the_loops(impl, seed):
    """Over 64 to 1,024 retained tokens, of a batch of three and two query heads a group: the plain loops."""
    for case in narrow(impl, seed, group=2):
        query, keys, values, _, moments = exact_states(case)
        agrees(impl, SCORE, query, keys, values, moments, also=score_in_loops)


@law("MK-12", of=ATTEND, examples=1, seed=seeds())
def test_the_output_at_the_budgets_of_the_paper_equals_the_loops(impl, seed):
    """Over 64 to 1,024 tokens, some kept and the others in the moments: the plain loops."""
    for case in narrow(impl, seed, group=2):
        query, keys, values, evicted, moments = exact_states(case)
        attends(impl, query, keys, values, ~evicted, moments, also=attend_in_loops)


@law("MK-9", of=("momentkv.approximate_evicted", "momentkv.log_evicted_partition"), examples=1, seed=seeds())
def test_the_estimate_at_the_budgets_of_the_paper_equals_the_loops(impl, seed):
    """Of 64 to 1,024 tokens: vbar + Stilde q / (n sqrt(d)), and the logarithm of the count plus the mean
    of the logits.
    """
    for case in narrow(impl, seed):
        query, keys, values, evicted, moments = exact_states(case)
        estimates, logarithms = (
            np.zeros((*query.shape[:2], values.shape[-1])),
            np.full(query.shape[:2], -np.inf),
        )
        for place in map(tuple, np.argwhere(evicted.any(axis=-1))):
            k, v, q = keys[place][evicted[place]], values[place][evicted[place]], query[place]
            logits = k @ q / np.sqrt(len(q))
            estimates[place] = (v * (1 + logits - logits.mean())[:, None]).mean(axis=0)
            logarithms[place] = np.log(len(k)) + logits.mean()
        agrees(impl, "momentkv.approximate_evicted", query, moments, also=estimates)
        agrees(impl, PARTITION, query, moments, also=logarithms)
