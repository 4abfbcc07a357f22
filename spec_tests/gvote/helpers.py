"""What several files of the laws of gvote use."""

from evictionary.spec_tests.judge.prelude import *

WEIGHTS, SELECT = "gvote.attention_weights", "gvote.select"


def drawn_queries(case, seed, samples):
    """A current query [B, H_q, D] and sampled ones [B, H_q, S, D],
    in quarters: exact in every dtype, and sometimes equal.
    """
    batch, num_query_heads, _, head_dim = case.queries.shape
    generator = np.random.default_rng(seed)
    states = np.round(4 * generator.normal(size=(batch, num_query_heads, samples + 1, head_dim))) / 4
    return states[:, :, 0], states[:, :, 1:]


def whole(case):
    """Keys in whole numbers up to 8: a logit is the same in whatever shape it is computed."""
    return np.clip(np.round(case.keys), -8, 8)


def mass_slack(impl, length):
    """What the comparison of a mass with p may be wrong by:
    p, the total and the sum are rounded, and sums accumulate.
    """
    return 2 * final_rounding(impl) + length * accumulating(impl)


def smallest_count(weights, mass):
    """How many of the largest weights it takes to reach `mass`, by adding them one by one."""
    counts = np.empty(weights.shape[:-1], dtype=int)
    for row in np.ndindex(counts.shape):
        total, counts[row] = 0.0, 0
        for weight in sorted(weights[row], reverse=True):
            if counts[row] and total >= mass:
                break
            total, counts[row] = total + weight, counts[row] + 1
    return counts


def bounds_of_budget(impl, weights, p):
    """The least and the largest B_0, [B, H_q] each, that weights [B, H_q, T], an allowance, leave open."""
    length = weights.expected.shape[-1]
    slack = length * weights.largest + mass_slack(impl, length)
    return tuple(smallest_count(weights.expected, p + sign * slack) for sign in (-1, 1))


def first_of_each(scores, budgets):
    """The first tokens of each row [.., T] of scores by a
    stable sort by falling score, as many as budgets [..] says.
    """
    return np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1) < budgets[..., None]


def check_each_selection(kept, scores, budgets):
    """Raise Violation unless each row of scores [.., T] keeps
    its own number of its best, whichever of equal scores.
    """
    require_mask(kept, scores.shape, "the selection")
    for row in np.ndindex(budgets.shape):
        selects(kept[row], scores[row], min(budgets[row], scores.shape[-1]))


def check_nucleus(kept, weights, p, slack):
    """Raise Violation unless each row of weights [.., T] has as many of its largest in the nucleus as
    reach p, within the slack.
    """
    require_mask(kept, weights.shape, "the nucleus")
    for row in np.ndindex(weights.shape[:-1]):
        falling, count = -np.sort(-weights[row]), int(kept[row].sum())
        mass = np.cumsum(falling) / falling.sum()
        least, most = np.searchsorted(mass, p - slack) + 1, np.searchsorted(mass, p + slack) + 1
        require(
            least <= count <= most, f"the nucleus has {count} tokens, wanted {least} to {most}", least, count
        )
        selects(kept[row], weights[row], count, what="the nucleus")


def check_votes(impl, kept, weights, logits, num_kv_heads, p):
    """Raise Violation unless each KV head keeps what its samples must vote for, and nothing that none of
    them may vote for.

    weights [B, H_q, T] and logits [B, H_q, S, T] are allowances: within them B_0 and the order of the tokens
    are free, and that of equal logits too.
    """
    batch, length = logits.expected.shape[0], logits.expected.shape[-1]
    require_mask(kept, (batch, num_kv_heads, length), "the selection")
    low, high = (count[..., None, None] for count in bounds_of_budget(impl, weights, p))
    mine, other = logits.expected[..., :, None], logits.expected[..., None, :]
    beaten = other > mine + 2 * logits.largest
    could_be_beaten = (other >= mine - 2 * logits.largest) & ~np.eye(length, dtype=bool)
    grouped = (batch, num_kv_heads, -1, length)
    must = (could_be_beaten.sum(axis=-1) < low).reshape(grouped).any(axis=2)
    may = (beaten.sum(axis=-1) < high).reshape(grouped).any(axis=2)
    require(
        not (must & ~kept).any(),
        "a token is evicted that is among the top B_0 of a sampled query",
        must,
        kept,
    )
    require(
        not (kept & ~may).any(), "a token is kept that is among the top B_0 of no sampled query", may, kept
    )


def oracle_votes(impl, query, keys, sampled):
    """The attention of the current query and the logits of the sampled ones, each query head with its KV
    head, h // G.
    """
    repeated = np.repeat(keys, query.shape[1] // keys.shape[1], axis=1)
    return impl.allowance(WEIGHTS, query, repeated), impl.allowance("gvote.sampled_logits", sampled, repeated)
