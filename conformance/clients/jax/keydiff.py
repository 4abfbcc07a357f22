"""KeyDiff in JAX: minus the cosine of each key to the mean of the unit keys."""

import jax
import jax.numpy as jnp


def unit(vectors):
    """The directions of [..., D]; a vector of zero stays
    zero. Scaled first, so that no square over- or underflows.
    """
    largest = jnp.abs(vectors).max(axis=-1, keepdims=True)
    vectors = vectors / jnp.where(largest == 0, 1, largest)
    norms = jnp.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    return vectors / jnp.where(norms == 0, 1, norms)


@jax.jit
def score(keys):
    directions = unit(keys.astype(jnp.promote_types(keys.dtype, jnp.float32)))
    anchor = unit(directions.mean(axis=-2, keepdims=True))
    return -(directions * anchor).sum(axis=-1)
