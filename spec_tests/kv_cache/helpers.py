"""Attention with a cache, token by token: what the laws of kv_cache compare with."""

from evictionary.spec_tests.judge.prelude import *

CASES = st.builds(
    Case,
    kind=st.sampled_from(["normal", "ties", "drift", "mixed_norms"]),
    seed=seeds(),
    batch=st.sampled_from([1, 2]),
    num_kv_heads=st.sampled_from([2, 3]),
    group=st.sampled_from([2, 3]),
    length=st.sampled_from([4, 2, 5, 9, 17]),
    head_dim=st.sampled_from([4, 2, 6, 8]),
    value_dim=st.sampled_from([3, 5, 2]),
)
"""Several KV heads of several readers each, so that no head is taken for another one by luck."""

BOUNDS = ((None, 0), (1, 0), (3, 0), (2, 1), (1, 3), (3, 2), (64, 1))
"""Windows and sinks: one token, a few, with sinks, more sinks than the window has tokens, a whole text."""


def text_of(impl, case, seed):
    """A query, a key and a value for each token of a text, rounded to the dtype."""
    return impl.rounded((prompt_queries(case, seed), case.keys, case.values))


def cut(states, start, stop):
    """The tokens from `start` to `stop` of queries, keys and values."""
    return tuple(each[:, :, start:stop] for each in states)


def seen_by(own, window, sinks):
    """The places that the token at place `own` sees, one after the other."""
    return [place for place in range(own + 1) if window is None or own - place < window or place < sinks]


def weights_by_hand(queries, keys, window=None, sinks=0):
    """The weights of each query over the keys that it sees, query by query."""
    found = np.zeros((*queries.shape[:-1], keys.shape[-2]))
    for place in np.ndindex(queries.shape[:-1]):
        seen = seen_by(keys.shape[-2] - queries.shape[-2] + place[-1], window, sinks)
        logits = [keys[place[:-1]][token] @ queries[place] / math.sqrt(keys.shape[-1]) for token in seen]
        powers = [math.exp(logit - max(logits)) for logit in logits]
        found[place][seen] = [power / math.fsum(powers) for power in powers]
    return found


def attend_by_hand(queries, keys, values, window=None, sinks=0):
    """The output of each query head, one after the other, [B, H_q, M, D_v]."""
    found = np.zeros((*queries.shape[:3], values.shape[-1]))
    for item, head in np.ndindex(queries.shape[:2]):
        own = item, head // (queries.shape[1] // keys.shape[1])
        found[item, head] = weights_by_hand(queries[item, head], keys[own], window, sinks) @ values[own]
    return found


def turned_by_hand(states, positions):
    """Each pair of channels (i, i + D/2) as a complex number that turns by its angle, token by token."""
    half, found = states.shape[-1] // 2, np.empty_like(states)
    for token, position in enumerate(positions):
        for pair in range(half):
            turn = complex(*(each(position * 10000.0 ** (-pair / half)) for each in (math.cos, math.sin)))
            point = (states[..., token, pair] + 1j * states[..., token, pair + half]) * turn
            found[..., token, pair], found[..., token, pair + half] = point.real, point.imag
    return found


def prefilled_by_hand(queries, keys, values, window=None, sinks=0):
    """The output of every token of a text that is read at once."""
    places = range(keys.shape[2])
    return attend_by_hand(
        turned_by_hand(queries, places), turned_by_hand(keys, places), values, window, sinks
    )


def size_of(queries, keys, values):
    """About how large the numbers are that plain loops round."""
    return (1 + np.abs(queries).max() * np.abs(keys).max() * keys.shape[-1]) * (1 + np.abs(values).max())


def decoded(impl, states, start, **bounds):
    """The outputs of the tokens from `start` on: those before it are read at once, and then one token after
    the other is decoded. Also the last cache.
    """
    _, cache = impl.kv_cache.prefill(*cut(states, 0, start), **bounds)
    outputs = []
    for token in range(start, states[0].shape[2]):
        output, cache = impl.kv_cache.decode(*(each[:, :, token] for each in states), cache, **bounds)
        outputs.append(output)
    return np.stack(outputs, axis=2), cache


def turned_by(impl, states, positions):
    """States as the implementation's own rotate turns them, or plain loops where it has none: what is wrong
    with rotate, its own laws say.
    """
    if impl.missing(("kv_cache.rotate",)):
        return turned_by_hand(states, positions)
    return impl.kv_cache.rotate(states, np.array(positions))


def check_turned(impl, got, expected, positions):
    """Raise Violation unless the keys are those [B, H, T, D] that are turned once, to these positions [T]."""
    radii = np.tile(np.hypot(*np.split(expected, 2, axis=-1)), 2)
    angle = np.array(positions)[:, None]
    rounds_to(impl, got, expected, "the turned keys", roundings=2, size=radii, angle=angle)


def check_held(impl, cache, turned, values, tokens):
    """Raise Violation unless a cache holds these tokens of a text, and no other, and has seen the whole text.

    turned [B, H, T, D] are the keys of the text, each turned to its position.
    """
    got_keys, got_values, seen = cache
    equal(seen, turned.shape[2], f"the cache has seen {seen} tokens, wanted {turned.shape[2]}")
    equal(got_values, values[:, :, tokens], "the values are not those of the tokens, in their order")
    check_turned(impl, got_keys, turned[:, :, tokens], tokens)
