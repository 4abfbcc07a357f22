"""What several files of the laws of momentkv use."""

from evictionary.reference import momentkv
from evictionary.reference.momentkv import Moments
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import attention_by_hand, mirrored

UPDATE, SCORE, ATTEND, PARTITION, SCORE_PROMPT, SELECT_PROMPT = (
    f"momentkv.{name}"
    for name in ("update", "score", "attend", "log_evicted_partition", "score_prompt", "select_prompt")
)


# Whole numbers of few bits: their sums and products are exact in every dtype.
short_cases = seeded_cases(
    max_length=17, kinds=("ties", "duplicate_keys"), head_dims=(2, 4), groups=(1, 2, 3)
)


def some(case, seed, shape=None):
    """A mask in which heads differ: one may hold everything, nothing, or some tokens."""
    generator = np.random.default_rng(seed)
    shape = shape or case.keys.shape[:3]
    share = generator.choice([0.0, 0.4, 0.8, 1.0], size=(*shape[:-1], 1))
    return generator.random(shape) < share


def moments_of(keys, values, evicted=True):
    evicted = np.broadcast_to(evicted, keys.shape[:-1])
    return momentkv.update(momentkv.no_moments(keys, values), keys, values, evicted)


def moments_in_loops(keys, values, evicted):
    """The moments of the evicted tokens, summed up token by token."""
    moments = momentkv.no_moments(keys, values)
    for item, head, token in np.argwhere(evicted):
        key, value = keys[item, head, token], values[item, head, token]
        for total, term in zip(moments, (1, key, value, np.outer(value, key)), strict=True):
            total[item, head] += term
    return moments


def held(impl, moments):
    """The moments, where the dtype under test can hold them;
    otherwise the case says nothing about the implementation.
    """
    if not all(np.isfinite(field).all() for field in impl.rounded(moments)):
        impl.unrepresentable()
    return moments


def situation(impl, case, seed):
    """The arguments of score: the retained tokens are those
    of the case, the evicted ones some of its next partition.
    """
    moments = held(
        impl, moments_of(case.next_keys, case.next_values, some(case, seed, case.next_keys.shape[:3]))
    )
    return case.queries[:, :, 0], case.keys, case.values, moments


def whole(case, seed):
    """Query, keys and values as whole numbers from -2 to 2, and a mask of some tokens."""
    states = case.queries[:, :, 0], case.keys, case.values
    return *(np.clip(np.round(array), -2, 2) for array in states), some(case, seed)


def heads_apart(impl, path, query, *states):
    """What `path` gives for each KV head alone, with its moments and its readers, put together again."""

    def of_head(state, own):
        return Moments(*(field[own] for field in state)) if isinstance(state, Moments) else state[own]

    found = [
        impl.call(path, query[readers], *(of_head(state, own) for state in states))
        for own, readers in heads_alone(query, states[0])
    ]
    return np.concatenate(found, axis=1).reshape(len(query), -1, found[0].shape[-1])


def recovers(impl, moments, pick, **another_way):
    """`agrees` where no quotient is exact by luck: n (S /
    n - vbar kbar^T) rounds where S - s_v kbar does not.
    """
    third = moments._replace(**{name: getattr(moments, name) * 4 / 3 for name in Moments._fields[1:]})
    more = impl.allowance("momentkv.recover", third, pick=pick).errors()
    return agrees(impl, "momentkv.recover", moments, pick=pick, more=more, **another_way)


def score_in_loops(query, keys, values, moments):
    alpha = over_group(
        causal_weights(query[:, :, None], for_each_reader(keys, query))[:, :, 0], keys.shape[1]
    )
    scores = np.zeros(keys.shape[:3])
    for item, head, token in np.ndindex(scores.shape):
        count = int(moments.count[item, head])
        key_sum, value_sum = moments.key_sum[item, head], moments.value_sum[item, head]
        residual = values[item, head, token].copy()
        if count:
            centred = moments.value_key_sum[item, head] - np.outer(value_sum, key_sum) / count
            residual -= value_sum / count + centred @ keys[item, head, token] / (
                count * keys.shape[-1] ** 0.5
            )
        scores[item, head, token] = alpha[item, head, token] * np.linalg.norm(residual)
    return scores


def turn(seed, query, keys, values, moments):
    """Channels of keys (with query and moments) exchanged
    and mirrored, and those of the values in another way.
    """
    generator = np.random.default_rng(seed)
    of_keys, of_values = (mirrored(generator, states.shape[-1]) for states in (keys, values))
    products = of_values.T @ moments.value_key_sum @ of_keys
    turned = Moments(moments.count, moments.key_sum @ of_keys, moments.value_sum @ of_values, products)
    return query @ of_keys, keys @ of_keys, values @ of_values, turned, of_values


def scale_values(impl, values, moments, factor):
    """The values and their moments as the dtype holds them,
    and both multiplied by the factor, a power of two.
    """
    values, moments = impl.rounded((values, moments))
    scaled = moments._replace(
        value_sum=moments.value_sum * factor, value_key_sum=moments.value_key_sum * factor
    )
    return values, moments, values * factor, held(impl, scaled)


def attends(impl, query, keys, values, kept, moments, *, by=agrees, **another_way):
    """`agrees` of the output, or `same`: 1 - what_R, as equation
    12 prints it, rounds at 1, however small the weight is.
    """
    of_each_query = Moments(*(field[:, :, None] for field in moments))
    estimate = momentkv.approximate_evicted(
        query.reshape(*keys.shape[:2], -1, query.shape[-1]), of_each_query
    )
    more = 2 * accumulating(impl) * float(np.abs(estimate).max(initial=0))
    return by(impl, ATTEND, query, keys, values, kept, moments, more=more, what="the output", **another_way)


def attend_in_loops(query, keys, values, kept, moments):
    """Plain loops over the kept tokens; then each query head
    whose KV head has evicted tokens mixes their estimate in.
    """
    output, logarithms = attention_by_hand(query[:, :, None], keys, values, kept)
    for item, reader in np.ndindex(query.shape[:2]):
        head = item, reader * keys.shape[1] // query.shape[1]
        if count := int(moments.count[head]):
            q, key_sum, value_sum = (
                query[item, reader] / keys.shape[-1] ** 0.5,
                moments.key_sum[head],
                moments.value_sum[head],
            )
            centred = moments.value_key_sum[head] - np.outer(value_sum, key_sum) / count
            estimate = value_sum / count + centred @ q / count
            weight = np.exp(
                -np.logaddexp(0, logarithms[item, reader, 0] - np.log(count) - q @ key_sum / count)
            )
            output[item, reader, 0] = (1 - weight) * output[item, reader, 0] + weight * estimate
    return output[:, :, 0]


def prompt(case, seed, window=0):
    """Queries of the last tokens of the case's prompt: a window of as many, or without a number of one,
    several, or all.
    """
    generator = np.random.default_rng(seed)
    window = window or int(generator.integers(1, case.keys.shape[2] + 1))
    return (
        generator.normal(size=(*case.queries.shape[:2], window, case.keys.shape[-1])),
        case.keys,
        case.values,
    )


def scores_of_prompt(chunk, queries, keys, values):
    """The scores of a prompt and its attention alone, [B, H_kv, T]: query by query, then over each chunk."""
    mass = over_group(causal_weights(queries, for_each_reader(keys, queries)).mean(axis=2), keys.shape[1])
    scores = mass * np.linalg.norm(values, axis=-1)
    for start in range(0, keys.shape[2], chunk):
        for numbers in (mass, scores):
            numbers[..., start : start + chunk] = numbers[..., start : start + chunk].mean(
                axis=-1, keepdims=True
            )
    return scores, mass


def check_prompt(impl, states, budget_of, **settings):
    """Raise Violation unless each head of a prompt keeps all protected tokens and its best others;
    `budget_of` their number.

    With a floor_ratio each head keeps a number of its own. Returns the mask, the protected tokens of a head,
    the budget, and the attention.
    """
    queries, keys, values = states
    place, length, chunk = np.arange(keys.shape[2]), keys.shape[2], settings.get("chunk_size", 4)
    safe = (place < settings.get("sink_size", 1)) | (place >= length - queries.shape[2])
    protected, budget = np.broadcast_to(safe, keys.shape[:3]), min(length, budget_of(int(safe.sum())))
    kept = impl.momentkv.select_prompt(queries, keys, values, budget, **settings)
    require_mask(kept, keys.shape[:3], "the selection")
    scores, mass = scores_of_prompt(chunk, *impl.rounded(states))
    allowed, more = (
        impl.allowance(SCORE_PROMPT, queries, keys, values, chunk_size=chunk),
        1e-12 * float(scores.max()),
    )
    counts = kept.sum(axis=-1) if "floor_ratio" in settings else budget
    selects(kept, scores, counts, slack=lambda: 2 * allowed.largest + more, protected=protected)
    return kept, safe, budget, mass
