"""Correct LagKVs of other kinds."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import torch

from evictionary.reference.lagkv import Stream
from evictionary.spec_tests.proof.planted import control
from evictionary.spec_tests.shared.variants_attention import ALL, NUMPY, hidden

SCORE, SELECT, RETAINED, STEP = "lagkv.score", "lagkv.select", "lagkv.retained_length", "lagkv.step"


def refuse_other_shapes(keys, values, next_keys, next_values) -> None:
    if keys.shape[:-1] != values.shape[:-1]:
        raise ValueError(f"values: got shape {tuple(values.shape)}, wanted the tokens of keys, {tuple(keys.shape)}")
    if keys.shape[-1] != next_keys.shape[-1]:
        raise ValueError(f"next_keys: got shape {tuple(next_keys.shape)}, wanted the channels of keys")
    if values.shape[-1] != next_values.shape[-1] or next_keys.shape[:-1] != next_values.shape[:-1]:
        raise ValueError(f"next_values: got shape {tuple(next_values.shape)}, wanted the channels of values")


def scorer(**claims):
    """Register a correct score by its part: what the keys, and likewise the values, of a partition have against the next one."""

    def decorate(part):
        @functools.wraps(part)
        def score(keys, values, next_keys, next_values):
            refuse_other_shapes(keys, values, next_keys, next_values)
            return part(keys, next_keys) + part(values, next_values)

        return control(SCORE, **claims)(score)

    return decorate


@scorer(dtypes=NUMPY)
def sums_of_squares(states, following):
    """The deviation from pairs of channels: the variance is half the mean squared difference of all pairs."""
    low, spread = following.min(axis=-2, keepdims=True), np.ptp(following, axis=-2, keepdims=True)
    scaled = np.divide(
        states - low, spread, out=np.zeros(np.broadcast_shapes(states.shape, low.shape), states.dtype), where=spread > 0
    )
    channels = scaled.shape[-1]
    if channels == 1:
        deviation = np.zeros(scaled.shape[:-1], states.dtype)
    else:
        pairs = scaled[..., :, None] - scaled[..., None, :]
        deviation = np.sqrt((pairs * pairs).sum(axis=(-2, -1)) / (2 * channels * (channels - 1)))
    weights = np.exp(deviation - deviation.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@scorer(dtypes=NUMPY)
def running_extremes(states, following):
    """Minimum and maximum kept while walking over the next partition, the softmax through a log-sum-exp."""
    low = high = following[..., 0, :]
    for token in range(1, following.shape[-2]):
        low, high = np.minimum(low, following[..., token, :]), np.maximum(high, following[..., token, :])
    low, spread = low[..., None, :], (high - low)[..., None, :]
    scaled = np.where(spread > 0, (states - low) / np.where(spread > 0, spread, 1), 0)
    deviation = scaled.std(axis=-1, ddof=1) if scaled.shape[-1] > 1 else scaled[..., 0] * 0
    top = deviation.max(axis=-1, keepdims=True)
    return np.exp(deviation - top - np.log(np.exp(deviation - top).sum(axis=-1, keepdims=True)))


def torch_part(states, following):
    low, high = following.amin(dim=-2, keepdim=True), following.amax(dim=-2, keepdim=True)
    scaled = torch.where(high == low, 0, (states - low) / torch.where(high == low, 1, high - low))
    deviation = scaled.std(dim=-1) if scaled.shape[-1] > 1 else torch.zeros_like(scaled[..., 0])
    return deviation.softmax(dim=-1)


@scorer(array_library="torch", dtypes=("float64", "float32", "bfloat16"))
def torch_eager(states, following):
    """torch in the dtype of its inputs."""
    return torch_part(states, following)


@scorer(array_library="torch", dtypes=("float16", "bfloat16"))
def torch_widened(states, following):
    """torch, computing in float32."""
    return torch_part(states.float(), following.float())


@control("lagkv.normalise", dtypes=NUMPY)
def inverted_range(states, next_states):
    low, spread = next_states.min(axis=-2, keepdims=True), np.ptp(next_states, axis=-2, keepdims=True)
    return (states - low) * np.divide(1, spread, out=np.zeros_like(spread), where=spread > 0)


@scorer(dtypes=NUMPY)
def times_the_reciprocal(states, following):
    """The range inverted once for each channel and multiplied with; the deviation in one pass (Welford)."""
    scaled = inverted_range(states, following)
    mean = squares = np.zeros(scaled.shape[:-1], scaled.dtype)
    for number in range(scaled.shape[-1]):
        distance = scaled[..., number] - mean
        mean = mean + distance / (number + 1)
        squares = squares + distance * (scaled[..., number] - mean)
    root = np.sqrt(squares / max(1, scaled.shape[-1] - 1))
    weights = np.exp(root - root.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@scorer(array_library="torch", dtypes=ALL)
def torch_padded_and_permuted(states, following):
    """Tokens before heads, both partitions filled up to tiles of 16 that are masked, in float32 or wider."""

    def tiles(states, filling):
        wide = (states if states.dtype == torch.float64 else states.float()).movedim(-2, 0)
        return torch.cat([wide, torch.full((-len(wide) % 16, *wide.shape[1:]), filling, dtype=wide.dtype)])

    low = tiles(following, torch.inf).unflatten(0, (-1, 16)).amin(dim=1).amin(dim=0)
    spread = tiles(following, -torch.inf).unflatten(0, (-1, 16)).amax(dim=1).amax(dim=0) - low
    scaled = torch.where(spread == 0, 0, (tiles(states, 7.0) - low) / torch.where(spread == 0, 1, spread))
    centred = scaled - scaled.mean(dim=-1, keepdim=True)
    deviation = ((centred * centred).sum(dim=-1) / max(1, scaled.shape[-1] - 1)).sqrt()
    deviation[states.shape[-2] :] = -torch.inf
    return deviation.softmax(dim=0)[: states.shape[-2]].movedim(0, -1)


def exact_count(keep_ratio, sink_size, lag_size) -> int:
    ratio = keep_ratio if isinstance(keep_ratio, Fraction) else Fraction(str(keep_ratio))
    for name, value, good in (
        ("keep_ratio", keep_ratio, 0 <= ratio <= 1),
        ("sink_size", sink_size, sink_size >= 0),
        ("lag_size", lag_size, lag_size >= 1),
    ):
        if not good:
            raise ValueError(f"{name}: got {value}")
    return math.floor(ratio * lag_size)


def compressed_partitions(keys, values, sink_size, lag_size):
    """The places of each partition that is compressed, and the arguments of its score."""
    for start in range(sink_size, keys.shape[2] - 2 * lag_size + 1, lag_size):
        own, following = slice(start, start + lag_size), slice(start + lag_size, start + 2 * lag_size)
        yield own, (keys[:, :, own], values[:, :, own], keys[:, :, following], values[:, :, following])


@control(SELECT)
def partition_by_partition(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    """A loop over partitions, the best found by repeated argmax."""
    count = exact_count(keep_ratio, sink_size, lag_size)
    kept = np.ones(keys.shape[:3], dtype=bool)
    for own, states in compressed_partitions(keys, values, sink_size, lag_size):
        scores = running_extremes(*states)
        chosen = np.zeros(scores.shape, dtype=bool)
        for _ in range(count):
            best = np.where(chosen, -np.inf, scores).argmax(axis=-1)
            np.put_along_axis(chosen, best[..., None], True, axis=-1)
        kept[:, :, own] = chosen
    return kept


def torch_sorted(keys, values, keep_ratio, sink_size, lag_size, scored):
    """All partitions at once, a stable sort for the best; `scored` has the arguments of `score`."""
    count = exact_count(keep_ratio, sink_size, lag_size)
    kept = torch.ones(keys.shape[:3], dtype=torch.bool)
    partitions = (keys.shape[2] - sink_size) // lag_size
    if partitions >= 2:
        end = sink_size + partitions * lag_size
        parts = [states[:, :, sink_size:end].unflatten(2, (partitions, lag_size)) for states in (keys, values)]
        scores = scored(*(part[:, :, :-1] for part in parts), *(part[:, :, 1:] for part in parts))
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        kept[:, :, sink_size : end - lag_size] = (rank < count).flatten(2)
    return kept


@control(SELECT, array_library="torch", dtypes=("float64", "float32", "bfloat16"))
def torch_select(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    return torch_sorted(keys, values, keep_ratio, sink_size, lag_size, torch_eager)


@control(SELECT, dtypes=("float32",))
def in_float32(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    """NumPy in float32, the threshold found by a partial sort, ties filled from the front."""
    count = exact_count(keep_ratio, sink_size, lag_size)
    kept = np.ones(keys.shape[:3], dtype=bool)
    for own, states in compressed_partitions(keys, values, sink_size, lag_size):
        scores = sums_of_squares(*states)
        if count == 0:
            kept[:, :, own] = False
            continue
        threshold = -np.partition(-scores, count - 1, axis=-1)[..., count - 1 : count]
        above, equal = scores > threshold, scores == threshold
        room = count - above.sum(axis=-1, keepdims=True)
        kept[:, :, own] = above | (equal & (np.cumsum(equal, axis=-1) <= room))
    return kept


def refuse_settings(length, keep_ratio, sink_size, lag_size) -> None:
    if length < 0:
        raise ValueError(f"length: got {length}")
    exact_count(keep_ratio, sink_size, lag_size)


@control(RETAINED)
def what_is_removed(length, *, keep_ratio, sink_size=16, lag_size=1024):
    """The length less what each compressed partition loses."""
    refuse_settings(length, keep_ratio, sink_size, lag_size)
    compressed = max(0, (length - sink_size) // lag_size - 1)
    return length - compressed * (lag_size - exact_count(keep_ratio, sink_size, lag_size))


@control(RETAINED)
def in_float_with_a_guard(length, *, keep_ratio, sink_size=16, lag_size=1024):
    """floor(rL) in binary floating point, the last bits rounded away first."""
    refuse_settings(length, keep_ratio, sink_size, lag_size)
    if length < sink_size + 2 * lag_size:
        return length
    count = math.floor(round(float(keep_ratio) * lag_size, 9))
    return sink_size + count * ((length - sink_size) // lag_size - 1) + lag_size + (length - sink_size) % lag_size


@control(RETAINED)
def partition_by_partition_counted(length, *, keep_ratio, sink_size=16, lag_size=1024):
    """Partitions struck off one by one while two whole ones are left."""
    refuse_settings(length, keep_ratio, sink_size, lag_size)
    count = exact_count(keep_ratio, sink_size, lag_size)
    uncompressed = max(0, length - sink_size)
    times = max(0, uncompressed // lag_size - 1)
    return min(sink_size, length) + times * count + uncompressed - times * lag_size


@control("lagkv.keep_ratio_for")
def searched(length, budget, *, sink_size=16, lag_size=1024):
    """The largest count of a partition that fits, by bisection."""
    lengths = {"sink_size": sink_size, "lag_size": lag_size}
    if what_is_removed(length, keep_ratio=1, **lengths) <= budget or length < sink_size + 2 * lag_size:
        return Fraction(1)
    low, high = 0, lag_size
    while high - low > 1:
        middle = (low + high) // 2
        fits = what_is_removed(length, keep_ratio=Fraction(middle, lag_size), **lengths) <= budget
        low, high = (middle, high) if fits else (low, middle)
    return Fraction(low, lag_size)


@control(STEP, max_length=4096)
def token_by_token(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    """Tokens enter one at a time; a partition is compressed at the moment when the next one is full."""
    count = exact_count(keep_ratio, sink_size, lag_size)
    batch, heads, new = keys.shape[:3]
    if stream is None:
        nothing = np.zeros((batch, heads, 0), dtype=int)
        stream = Stream(keys[:, :, :0], values[:, :, :0], nothing, sink_size, 0)
    for name, own, given in (("keys", stream.keys, keys), ("values", stream.values, values)):
        if (*own.shape[:2], own.shape[3]) != (*given.shape[:2], given.shape[3]):
            raise ValueError(f"{name}: got shape {given.shape}, wanted the heads and channels of the stream")
    rows, static, seen = [stream.keys, stream.values, stream.positions], stream.static_length, stream.seen
    for token in range(new):
        one = slice(token, token + 1)
        place = np.full((batch, heads, 1), seen)
        rows = [np.concatenate(pair, axis=2) for pair in zip(rows, (keys[:, :, one], values[:, :, one], place), strict=True)]
        seen += 1
        if rows[0].shape[2] == static + 2 * lag_size:
            own, following = slice(static, static + lag_size), slice(static + lag_size, None)
            scores = running_extremes(rows[0][:, :, own], rows[1][:, :, own], rows[0][:, :, following], rows[1][:, :, following])
            kept = np.ones(rows[2].shape, dtype=bool)
            kept[:, :, own] = scores.argsort(axis=-1, kind="stable")[..., ::-1].argsort(axis=-1) < count
            rows = [entry[kept].reshape(batch, heads, -1, *entry.shape[3:]) for entry in rows]
            static += count
    return Stream(rows[0], rows[1], rows[2], static, seen)


@control("lagkv_theory.attention_weights", array_library="torch", dtypes=("float64", "float32"))
def torch_masked_softmax(queries, keys):
    new, length = queries.shape[-2], keys.shape[-2]
    if new > length:
        raise ValueError(f"queries: got {new}, wanted at most {length}")
    logits = torch.einsum("...md,...td->...mt", queries / math.sqrt(keys.shape[-1]), keys)
    return logits.masked_fill(hidden(new, length), -torch.inf).softmax(dim=-1)


@control("lagkv_theory.attention_output", dtypes=NUMPY)
def head_by_head(weights, values, output_weight):
    """The sum over the heads, each with its own rows of W_O."""
    rows = np.split(output_weight, weights.shape[-3], axis=-2)
    return sum(weights[..., head, :, :] @ (values[..., head, :, :] @ own) for head, own in enumerate(rows))


@control("lagkv_theory.project", array_library="torch", dtypes=ALL)
def torch_one_matrix(states, query_weight, key_weight, value_weight):
    """One product with the three matrices side by side."""
    joined = torch.cat([query_weight, key_weight, value_weight], dim=-1)
    return tuple((states @ joined).split([query_weight.shape[-1], key_weight.shape[-1], value_weight.shape[-1]], dim=-1))


@control("lagkv_variants.local_score", dtypes=NUMPY)
def sums_of_squares_against_itself(keys, values):
    return sums_of_squares(keys, values, keys, values)


@control("lagkv_variants.local_select", array_library="torch", dtypes=("float64", "float32", "bfloat16"))
def torch_local_select(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    return torch_sorted(keys, values, keep_ratio, sink_size, lag_size, lambda own, also, *_: torch_eager(own, also, own, also))


@control("lagkv_variants.norm_select", array_library="torch", dtypes=ALL)
def torch_norm_select(keys, values, *, layer, keep_ratio, sink_size=16, lag_size=1024, skipped_layers=2):
    if layer < 0:
        raise ValueError(f"layer: got {layer}")
    kept = torch_sorted(keys, values, keep_ratio, sink_size, lag_size, lambda own, *_: -own.float().norm(dim=-1))
    return kept | (layer < skipped_layers)
