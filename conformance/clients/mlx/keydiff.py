"""KeyDiff in MLX: minus the cosine of each key to the mean of the unit keys."""

import mlx.core as mx


def unit(vectors):
    """The directions of [..., D]; a vector of zero stays
    zero. Scaled first, so that no square over- or underflows.
    """
    largest = mx.abs(vectors).max(axis=-1, keepdims=True)
    vectors = vectors / mx.where(largest == 0, 1, largest)
    norms = mx.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    return vectors / mx.where(norms == 0, 1, norms)


def score(keys):
    directions = unit(keys if keys.dtype == mx.float64 else keys.astype(mx.float32))
    anchor = unit(directions.mean(axis=-2, keepdims=True))
    return -(directions * anchor).sum(axis=-1)
