"""Correct SnapKVs of other kinds."""

from evictionary.spec_tests.shared.variants import *

SCORE, POOL = "snapkv.score", "snapkv.average_pool"


def before_a_window_of(default):
    """A score as the scores of the tokens before the window, [B, H_kv, T - W], by the window's queries;
    the window has infinity.
    """

    def decorate(scored):
        @functools.wraps(scored)
        def score(queries, keys, *states, window_size=default, **settings):
            library, before = (
                torch if isinstance(keys, torch.Tensor) else np,
                max(0, keys.shape[2] - window_size),
            )
            scores = library.full(keys.shape[:3], library.inf, dtype=keys.dtype)
            if before:
                scores[..., :before] = scored(queries[:, :, -window_size:], keys, *states, **settings)
            return scores

        return score

    return decorate


def window_above_the_rest(score):
    """As in kvpress, the window has a finite score: one more than twice the largest of the others."""

    def finite(*states, **settings):
        scores = score(*states, **settings)
        return torch.where(scores.isinf(), 2 * scores.where(scores.isfinite(), 0).amax() + 1, scores)

    return finite


def convolved(weights, kernel_size):
    kernel = np.full(kernel_size, 1 / kernel_size, weights.dtype)
    rows = [
        np.convolve(row, kernel)[kernel_size // 2 :][: row.size]
        for row in weights.reshape(-1, weights.shape[-1])
    ]
    return np.stack(rows).reshape(weights.shape)


def shifted_sums(weights, kernel_size):
    """The shifted rows added up from the farthest, and then divided."""
    total, length = np.zeros_like(weights), weights.shape[-1]
    for shift in range(min(kernel_size // 2, length - 1), 0, -1):
        total[..., shift:] += weights[..., :-shift]
        total[..., :-shift] += weights[..., shift:]
    return (total + weights) / kernel_size


@control(POOL, array_library="torch", dtypes=ALL)
def torch_pooled(weights, kernel_size):
    """torch's own average pooling, which counts the padding."""
    pooled = torch.nn.functional.avg_pool1d(
        weights.reshape(-1, 1, weights.shape[-1]), kernel_size, 1, kernel_size // 2
    )
    return pooled.reshape(weights.shape)


@control(SCORE, dtypes=NUMPY)
@before_a_window_of(32)
def tiled(queries, keys, *, kernel_size=7):
    """Tiles of 16 tokens with a running maximum and sum;
    group and window added up query by query; a convolution.
    """
    weights = streamed(queries, keys)[..., : -queries.shape[2]]
    rows = weights.reshape(*keys.shape[:2], -1, weights.shape[-1])
    return convolved(
        sum(rows[:, :, row] for row in reversed(range(rows.shape[2]))) / rows.shape[2], kernel_size
    )


@control(SCORE, dtypes=NUMPY)
@before_a_window_of(32)
def pooled_first(queries, keys, *, kernel_size=7):
    """Each query's weights pooled by themselves, and then the mean over the window and the group."""
    pooled = shifted_sums(streamed(queries, keys)[..., : -queries.shape[2]], kernel_size)
    return pooled.reshape(*keys.shape[:2], -1, pooled.shape[-1]).mean(axis=2)


@control(SCORE, array_library="torch", dtypes=("float32", "float16", "bfloat16"))
@before_a_window_of(32)
def torch_rounding_each_step(queries, keys, *, kernel_size=7):
    received = (
        torch_weights(queries, keys)[..., : -queries.shape[2]].mean(dim=2).unflatten(1, (keys.shape[1], -1))
    )
    return torch_pooled(received.mean(dim=2), kernel_size)


torch_in_float32 = through_float32(torch_rounding_each_step)
control(SCORE, array_library="torch", dtypes=ALL, name="torch_in_float32")(torch_in_float32)
control(SCORE, array_library="torch", dtypes=ALL, name="torch_window_above_the_rest")(
    window_above_the_rest(torch_in_float32)
)
