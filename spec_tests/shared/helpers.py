"""What several files of the laws of shared use."""

import inspect
from collections.abc import Callable

from evictionary.spec_tests.judge.misfits import beside, fitting
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.judge.remote import Gone


def draw_mask(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A mask whose heads keep different numbers of tokens, some all and some none."""
    generator = np.random.default_rng(seed)
    share = generator.choice([0.0, 0.2, 0.5, 1.0], size=(*shape[:-1], 1))
    return generator.random(shape) < share


def takes(impl: Implementation, path: str, argument: str) -> bool:
    """Whether the function has this argument, which older implementations of it may lack."""
    stem, name = path.split(".")
    parameters = inspect.signature(getattr(impl.modules[stem], name)).parameters.values()
    return any(
        each.name == argument or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in parameters
    )


def without(path: str, argument: str) -> Callable[[Any], str]:
    """A `not_for`: the law asks for an argument with a default that older implementations of the function
    do not take.
    """
    return lambda impl: "" if takes(impl, path, argument) else f"its {path} takes no {argument}"


def refuse(impl: Implementation, path: str, wrong: Misfit) -> None:
    """Raise Violation unless the call is refused by the name
    of the argument, or a NaN shows where that is enough.
    """
    parameters = inspect.signature(oracle(path)).parameters
    by_name = {
        name: value
        for name, value in wrong.given.items()
        if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    }
    by_place = [value for name, value in wrong.given.items() if name not in by_name]
    if not wrong.shows:
        refused(impl, wrong.named, path, *by_place, **by_name)
        return
    try:
        got = impl.call(path, *by_place, **by_name)
    except (Violation, Gone):  # no answer is no refusal
        raise
    except Exception as error:
        if impl.strict and not isinstance(error, ValueError):
            raise
        return
    every = got if isinstance(got, tuple) else [got]
    shown = any(np.isnan(np.asarray(each, dtype=np.float64)).any() for each in every)
    require(shown, f"{wrong.what} passes in silence", np.nan, got)


def refuses(impl: Implementation, path: str, argument: str, value: Any, **settings: Any) -> None:
    """Raise Violation unless this value is refused by the name of its argument, beside others that fit."""
    given = fitting(path) | settings | {argument: value}
    refuse(impl, path, Misfit(argument, "", given, others=beside(path, argument, value)))


def quarters(seed, *shape):
    """Normal numbers in quarters: the same in every dtype."""
    return np.round(4 * np.random.default_rng(seed).normal(size=shape)) / 4


def a_mask(got, shape):
    """The answer; Violation unless it is a boolean mask of this shape."""
    require_mask(got, shape, "the selection")
    return got


def two_readers(channels, tokens, queries=1):
    """Queries of four heads and keys of two, in which the readers of KV head 1 look at token 0 and those of
    KV head 0 at all tokens alike.
    """
    looking, keys = np.zeros((1, 4, queries, channels)), np.zeros((1, 2, tokens, channels))
    looking[0, 2:, :, 0], keys[0, :, 0, 0] = 16, 16
    return looking, keys


def softmax(logits):
    """Of each row [.., T] of numbers, about their largest."""
    powers = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def latest(shape, count):
    """A mask of the last tokens of each row."""
    return np.broadcast_to(np.arange(shape[-1]) >= shape[-1] - count, shape)


def window_scored(impl, path, queries, keys, *values, **settings):
    """The scores, infinite in a window that scores more
    than all tokens before it, as it may by any number.
    """
    default = inspect.signature(oracle(path)).parameters["window_size"].default
    got = impl.call(path, queries, keys, *values, **settings)
    return window_above_all(got, keys, settings.get("window_size", default))


def check_window(impl, path, states, share, more=0.0, **settings):
    """Raise Violation unless the window scores more than all other tokens, and top-k keeps it and the best
    of the others.
    """
    scores = window_scored(impl, path, *states, **settings)
    window = latest(scores.shape, settings["window_size"])
    equal(np.isinf(scores), window, "another token than those of the window scores more than all others")
    allowed, length = impl.allowance(path, *states, **settings), scores.shape[2]
    budget = min(length, settings["window_size"] + int(share * length))
    kept = impl.selection.top_k(scores, budget)
    selects(kept, allowed.expected, budget, slack=lambda: allowed.largest + more, protected=window)


def or_a_trace(weights):
    """The weights, and a millionth of the largest in place
    of those below it: an implementation may lose them.
    """
    return np.maximum(weights, 1e-6 * weights.max())


def mirrored(generator, size):
    """An orthogonal map [size, size] that exchanges channels and turns some around."""
    return np.eye(size)[generator.permutation(size)] * generator.choice([-1.0, 1.0], size=(size, 1))


def holds_tokens(cache, keys, values):
    """Raise Violation unless a cache holds the keys and the values of the tokens at its positions."""
    for name, states in (("keys", keys), ("values", values)):
        wanted = np.take_along_axis(states, cache.positions[..., None], axis=-2)
        equal(getattr(cache, name), wanted, f"the {name} are not those of the tokens at the positions")


def most_some_few(case):
    """A mask of a long prompt, whose heads keep most, some and few tokens."""
    shares = np.array([0.9, 0.3, 0.001])[: case.num_kv_heads, None]
    return np.random.default_rng(case.seed).random(case.keys.shape[:3]) < shares


def attention_by_hand(queries, keys, values, kept):
    """Attention of queries [B, H_q, M, D] and its log-sum-exp, in loops over the query heads and the kept
    tokens [B, H_kv, T].
    """
    group = queries.shape[1] // keys.shape[1]
    output, normaliser = np.zeros((*queries.shape[:3], values.shape[-1])), np.full(queries.shape[:3], -np.inf)
    for item, reader in np.ndindex(queries.shape[:2]):
        head = item, reader // group
        if not kept[head].any():
            continue
        logits = linear(queries[item, reader], keys[head][kept[head]].T) / np.sqrt(keys.shape[-1])
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        total = exponentials.sum(axis=-1)
        output[item, reader] = exponentials @ values[head][kept[head]] / total[:, None]
        normaliser[item, reader] = logits.max(axis=-1) + np.log(total)
    return output, normaliser


def sorted_choice(scores, count, protected):
    """The `count` first of each row by a stable sort: the
    protected before the others, then by falling score.
    """
    by_score = np.argsort(-scores, axis=-1, kind="stable")
    second = np.argsort(~np.take_along_axis(protected, by_score, axis=-1), axis=-1, kind="stable")
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, np.take_along_axis(by_score, second, axis=-1)[..., :count], True, axis=-1)
    return kept
