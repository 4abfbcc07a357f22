"""Right CAKEs of other forms."""

from evictionary.spec_tests.shared.variants import *


@control("cake.dispersion", dtypes=NUMPY)
def in_bits(attention):
    """Base 2, of the shares that are there."""
    bits = attention * np.log2(np.maximum(attention, np.finfo(attention.dtype).tiny))
    return -bits.sum(axis=-1).sum(axis=-1) * attention.dtype.type(np.log(2))


@control("cake.shift", dtypes=NUMPY)
def library_variance(attention):
    """The library's sample variance; of one query that with M."""
    return attention.var(axis=-2, ddof=min(1, attention.shape[-2] - 1)).sum(axis=-1)


@control("cake.budgets")
def rounded_to_the_nearest(budget, preferences, *, num_layers=None, length=None, window_size=0):
    """One token after another, to the layer that is farthest below its share in the middle of a token."""
    count, budget = len(preferences), min(budget, length or budget)
    least = min(budget, max(1, window_size))
    given, got = [Fraction(float(each)) for each in preferences], [least] * count
    for _ in range((num_layers or count) * (budget - least)):
        if free := [layer for layer in range(count) if got[layer] < (length or np.inf)]:
            got[max(free, key=lambda each: (given[each] / (2 * (got[each] - least) + 1), -got[each]))] += 1
    return got
