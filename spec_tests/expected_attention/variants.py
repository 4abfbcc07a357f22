"""Correct Expected Attentions of other kinds."""

from evictionary.spec_tests.expected_attention import forms
from evictionary.spec_tests.rope.variants import torch_angles
from evictionary.spec_tests.shared.forms import softmax_online, top_by_sorted
from evictionary.spec_tests.shared.variants import *

STEM = "expected_attention"
SCORE, ROPE, STEP, STATISTICS = (
    f"{STEM}.{name}" for name in ("score", "average_rope", "decode_step", "query_statistics")
)
HALVES = ("float16", "bfloat16")


control(SCORE, dtypes=NUMPY, name="tiled")(put_together(forms, "score", softmax=softmax_online))


@control(SCORE, dtypes=NUMPY)
def tokens_first(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    """A permuted layout, each pair of channels once and doubled, the group's weights summed from the last
    query head on.
    """
    heads, dim = keys.shape[1], keys.shape[-1]
    by_token = np.ascontiguousarray(keys.transpose(2, 0, 1, 3))
    mean, covariance = (
        entry.reshape(entry.shape[0], heads, -1, *entry.shape[2:]) for entry in (query_mean, query_covariance)
    )
    once = np.triu(covariance, 1)
    squares = np.einsum("tbhd,bhgd,tbhd->tbhg", by_token, np.einsum("bhgdd->bhgd", covariance), by_token)
    pairs = np.einsum("tbhd,bhgde,tbhe->tbhg", by_token, once, by_token)
    logits = (
        np.einsum("tbhd,bhgd->tbhg", by_token, mean) / keys.dtype.type(math.sqrt(dim))
        + (squares / 2 + pairs) / dim
    )
    weights = np.exp(logits - logits.max(axis=0))
    weights = weights / weights[::-1].sum(axis=0)
    total = sum(weights[..., reader] for reader in reversed(range(mean.shape[2])))
    scores = (total / mean.shape[2] + keys.dtype.type(epsilon)).transpose(1, 2, 0)
    return np.sqrt(np.einsum("bhtd,bhtd->bht", values, values)) * scores


def torch_logits(keys, query_mean, query_covariance):
    """[B, H_q, T], the keys repeated for each query head."""
    repeated = keys.repeat_interleave(query_mean.shape[1] // keys.shape[1], dim=1)
    quadratic = ((repeated @ query_covariance) * repeated).sum(dim=-1)
    return (repeated @ query_mean[..., None])[..., 0] / math.sqrt(keys.shape[-1]) + quadratic / (
        2 * keys.shape[-1]
    )


def torch_scored(weights, values, epsilon):
    group = weights.unflatten(1, (values.shape[1], -1)).mean(dim=2)
    return (group + epsilon) * torch.linalg.vector_norm(values, dim=-1)


@control(SCORE, array_library="torch", dtypes=("float32", *HALVES))
def torch_rounding_each_step(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return torch_scored(torch_logits(keys, query_mean, query_covariance).softmax(dim=-1), values, epsilon)


torch_in_float32 = through_float32(torch_rounding_each_step)
control(SCORE, array_library="torch", dtypes=("float64", *HALVES), name="torch_in_float32")(torch_in_float32)


@control(SCORE, array_library="torch", dtypes=NUMPY)
def torch_log_softmax(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    return torch_scored(
        torch_logits(keys, query_mean, query_covariance).log_softmax(dim=-1).exp(), values, epsilon
    )


@control(SCORE, array_library="torch", dtypes=NUMPY)
def padded_powers_of_two(keys, values, query_mean, query_covariance, *, epsilon=0.02):
    """As a kernel does it: tokens padded to a multiple of
    16 and masked, logits scaled by log2 e, powers of two.
    """
    length = keys.shape[2]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -length % 16), value=3.0)
    logits = torch_logits(padded, query_mean, query_covariance) * math.log2(math.e)
    logits[..., length:] = -torch.inf
    powers = torch.exp2(logits - logits.amax(dim=-1, keepdim=True))
    return torch_scored((powers / powers.sum(dim=-1, keepdim=True))[..., :length], values, epsilon)


def turned(states, cos, sin):
    """The last axis turned pair by pair, without a matrix."""
    first, second = np.split(states, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def both_sides(states, cos, sin):
    return turned(turned(states, cos, sin).swapaxes(-1, -2), cos, sin).swapaxes(-1, -2)


@control(ROPE, dtypes=NUMPY)
def geometric_series(query_mean, query_covariance, **window):
    cos, sin = (
        wave.astype(query_mean.dtype) for wave in forms.waves_in_closed_form(query_mean.shape[-1], **window)
    )
    return turned(query_mean, cos, sin), both_sides(query_covariance, cos, sin)


@control(ROPE, array_library="torch", dtypes=ALL)
@through_float32
def torch_complex_pairs(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    """Each pair as a complex number times the mean phase."""
    angles = torch_angles(query_mean, torch.arange(position, position + horizon), theta).chunk(2, dim=-1)[0]
    phase = torch.polar(torch.ones_like(angles), angles).mean(dim=0)

    def turn(states):
        pairs = torch.complex(*states.chunk(2, dim=-1)) * phase
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    return turn(query_mean), turn(turn(query_covariance).mT).mT


@control(ROPE, array_library="torch", dtypes=ALL)
def torch_rounded_table(query_mean, query_covariance, *, position, horizon=512, theta=10000.0):
    """The averaged matrix rounded to the dtype of the statistics, and matrix products in that dtype."""
    angles = torch_angles(query_mean, torch.arange(position, position + horizon), theta).chunk(2, dim=-1)[0]
    cos, sin = torch.diag(angles.cos().mean(dim=0)), torch.diag(angles.sin().mean(dim=0))
    rotation = torch.cat([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)]).to(query_mean.dtype)
    return query_mean @ rotation.T, rotation @ query_covariance @ rotation.T


control(STATISTICS, dtypes=NUMPY, name="one_query_at_a_time")(forms.statistics_running)


@control(STATISTICS, array_library="torch", dtypes=ALL)
@through_float32
def torch_products_with_ones(queries):
    """The mean as a product with ones, the covariance by einsum, stored channel by channel."""
    by_channel, count = queries.mT.contiguous(), queries.shape[-2]
    mean = by_channel @ by_channel.new_full((count,), 1 / count)
    centred = by_channel - mean[..., None]
    return mean, torch.einsum("...dn,...en->...de", centred.flip(-1), centred.flip(-1) / count)


def grown(state, query, key, value, *, interval, buffer_size):
    """The state with the token added, NumPy or torch; its steps are 0 where a compression is due."""
    library, token = torch if isinstance(key, torch.Tensor) else np, (key, value, query)
    rows = zip((state.keys, state.values, state.queries), token, strict=True)
    keys, values, queries = (library.concatenate([old, new[:, :, None]], 2) for old, new in rows)
    positions = library.concatenate([state.positions, library.full((*keys.shape[:2], 1), state.position)], 2)
    return state._replace(
        keys=keys,
        values=values,
        positions=positions,
        queries=queries[:, :, -buffer_size:],
        position=state.position + 1,
        steps=(state.steps + 1) % interval,
    )


def torch_step(state, query, key, value, *, target, interval=512, buffer_size=128, epsilon=0.02, **window):
    """The scores rounded to the dtype of the keys between the functions, masks in place of indices."""
    after = grown(state, query, key, value, interval=interval, buffer_size=buffer_size)
    if after.steps or after.keys.shape[2] <= target:
        return after
    statistics = torch_complex_pairs(
        *torch_products_with_ones(after.queries), position=after.position, **window
    )
    kept = torch_top(torch_in_float32(after.keys, after.values, *statistics, epsilon=epsilon), target)
    keys, values, positions = (
        rows[kept].unflatten(0, (*kept.shape[:2], target))
        for rows in (after.keys, after.values, after.positions)
    )
    return after._replace(keys=keys, values=values, positions=positions)


control(STEP, array_library="torch", dtypes=HALVES, name="torch_rounded_between")(torch_step)
control(STEP, array_library="torch", dtypes=ALL, name="torch_gathering")(through_float32(torch_step))


@control(f"{STEM}.log_expected_scores", dtypes=NUMPY)
def factors_of_the_covariance(keys, query_mean, query_covariance):
    """One einsum for the linear part, the quadratic part key by key as the sum of all entries of Sigma
    times k k^T.
    """
    outer = keys[..., :, None] * keys[..., None, :]
    quadratic = (outer * query_covariance[..., None, :, :]).sum(axis=(-2, -1))
    dim = keys.shape[-1]
    return np.einsum("...td,...d->...t", keys, query_mean / keys.dtype.type(math.sqrt(dim))) + quadratic / (
        2 * dim
    )


@control("expected_attention_theory.removal_error", dtypes=NUMPY)
def leaving_one_out(weights, values, w_o):
    """Attention computed again without each token, from its definition."""
    full = (weights[..., None] * values).sum(axis=-2)
    errors = []
    for token in range(weights.shape[-1]):
        others = np.delete(np.arange(weights.shape[-1]), token)
        left = weights[..., others] / weights[..., others].sum(axis=-1, keepdims=True)
        errors.append(
            np.linalg.norm((full - (left[..., None] * values[..., others, :]).sum(axis=-2)) @ w_o.T, axis=-1)
        )
    return np.stack(errors, axis=-1)


@control(f"{STEM}.listing_1")
def sorted_listing(queries, keys, values, compression_ratio):
    """A sorted list of tokens, the best cut off."""
    logits = factors_of_the_covariance(keys, *forms.statistics_running(queries))
    scores = np.exp(logits - logits.max()) * np.linalg.norm(values, axis=-1)
    kept = top_by_sorted(scores, max(1, len(scores) * (100 - round(100 * compression_ratio)) // 100))
    return keys[kept], values[kept]
