"""Correct Attention Matchings of other kinds."""

from evictionary.reference.attention_matching import HIGH, LOW
from evictionary.spec_tests.shared.forms import softmax_online
from evictionary.spec_tests.shared.variants import *

SELECT, SCORE, BOUNDED, BIAS, VALUES, ATTEND = (
    f"attention_matching.{name}"
    for name in ("select", "score", "bounded_least_squares", "fit_bias", "fit_values", "attend")
)


def rows_of(queries, keys):
    """The queries of each KV head's group, one below the other."""
    return queries.reshape(*keys.shape[:2], -1, keys.shape[-1])


@control(SCORE, dtypes=NUMPY)
def query_after_query(keys, replay_queries):
    """A running sum of squares."""
    squares = np.zeros(keys.shape[:3], keys.dtype)
    rows = rows_of(replay_queries, keys) * keys.dtype.type(keys.shape[-1] ** -0.5)
    for place in range(rows.shape[2]):
        squares += softmax_online((keys @ rows[:, :, place, :, None])[..., 0]) ** 2
    return np.sqrt(squares / keys.dtype.type(rows.shape[2]))


@control(SCORE, array_library="torch", dtypes=ALL)
@through_float32
def torch_norm(keys, replay_queries):
    """The Euclidean norm over the queries, divided by the root of their number."""
    logits = rows_of(replay_queries, keys) @ keys.mT / keys.shape[-1] ** 0.5
    return torch.linalg.vector_norm(logits.softmax(dim=-1), dim=2) / logits.shape[2] ** 0.5


def coordinate_descent(matrix, target):
    """One weight after the other, each the best beside the others, from a half on."""
    weights = np.full(matrix.shape[1], 0.5)
    squares = (matrix**2).sum(axis=0)
    residual = target - matrix @ weights
    for _ in range(20_000):
        before = weights.copy()
        for place in np.flatnonzero(squares):
            best = weights[place] + matrix[:, place] @ residual / squares[place]
            best = min(max(best, LOW), HIGH)
            residual = residual - matrix[:, place] * (best - weights[place])
            weights[place] = best
        if np.abs(weights - before).max() < 1e-12:
            break
    return weights


@control(BOUNDED, edges=False)
def one_weight_after_the_other(matrix, target):
    found = np.zeros((*matrix.shape[:-2], matrix.shape[-1]))
    for place in np.ndindex(found.shape[:-1]):
        found[place] = coordinate_descent(matrix[place], target[place])
    return found


@control(BIAS, array_library="torch", dtypes=("float32",), edges=False)
@in_float32
def torch_accelerated_gradient(queries, keys, kept):
    """Nesterov's projected gradient, begun at all weights 1; the exponentials by their logarithms."""
    logits = (rows_of(queries, keys) @ keys.mT / keys.shape[-1] ** 0.5).double()
    powers = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    matrix = powers.mT[kept].unflatten(0, (*kept.shape[:2], -1)).mT
    step = 1 / torch.linalg.matrix_norm(matrix, ord=2).square().clamp(min=1e-30)[..., None]
    target = powers.sum(dim=-1)
    ahead = weights = torch.ones_like(matrix[..., 0, :])
    for count in range(3000):
        slope = ((target - (matrix @ ahead[..., None])[..., 0])[..., None, :] @ matrix)[..., 0, :]
        last, weights = weights, (ahead + step * slope).clamp(LOW, HIGH)
        ahead = weights + count / (count + 3) * (weights - last)
    return weights.log().to(keys.dtype)


@control(VALUES, array_library="torch", dtypes=NUMPY, edges=False)
@in_float32
def torch_shortest(queries, keys, values, kept, bias):
    """The shortest of the best values, as in the public code, by singular values."""
    logits = (rows_of(queries, keys) @ keys.mT / keys.shape[-1] ** 0.5).double()
    of_kept = logits.mT[kept].unflatten(0, (*kept.shape[:2], -1)).mT + bias[:, :, None]
    inverse = torch.linalg.pinv(of_kept.softmax(dim=-1), rtol=1e-9)
    return (inverse @ (logits.softmax(dim=-1) @ values.double())).to(keys.dtype)


@control(ATTEND, dtypes=NUMPY)
def one_more_channel(queries, keys, values, bias):
    """The bias as one more channel of the keys, beside a query of 1."""
    wide = np.concatenate([keys * keys.dtype.type(keys.shape[-1] ** -0.5), bias[..., None]], axis=-1)
    rows = rows_of(queries, keys)
    rows = np.concatenate([rows, np.ones((*rows.shape[:3], 1), keys.dtype)], axis=-1)
    return (softmax_online(rows @ np.swapaxes(wide, -1, -2)) @ values).reshape(*queries.shape[:3], -1)


@control(ATTEND, array_library="torch", dtypes=ALL)
@through_float32
def torch_mask(queries, keys, values, bias):
    """torch's own attention: the bias is its mask."""
    keys, values, bias = (
        each.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1) for each in (keys, values, bias)
    )
    mask = bias[:, :, None].expand(*queries.shape[:3], -1)
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
