"""Corrections that are never worse, of other kinds."""

from evictionary.reference.momentkv_bounded import Bounds
from evictionary.spec_tests.shared.variants import *


@control("momentkv_bounded.update", dtypes=ALL)
def head_by_head(bounds, keys, values, evicted):
    """The evicted rows of each head gathered, the bounds before as two rows more."""
    after = Bounds(*(np.array(field) for field in bounds))
    for place in np.ndindex(evicted.shape[:2]):
        for states, (low, high) in ((keys, after[:2]), (values, after[2:])):
            rows = states[place][evicted[place]]
            low[place] = np.vstack([low[place], rows]).min(axis=0)
            high[place] = np.vstack([high[place], rows]).max(axis=0)
    return after


def by_reader(query, keys, values, kept, moments, bounds):
    """For each query head, one after the other: f_R, MomentKV's
    output, the least and the largest possible output.
    """
    root, group = math.sqrt(keys.shape[-1]), query.shape[1] // keys.shape[1]
    for item, reader in np.ndindex(*query.shape[:2]):
        place, q = (item, reader // group), query[item, reader]
        (retained,), (size,) = online(q[None], keys[place][kept[place]], values[place][kept[place]])
        count = int(moments.count[place])
        if not count:
            yield retained, retained, retained, retained
            continue
        mean_key, mean = moments.key_sum[place] / count, moments.value_sum[place] / count
        slope = moments.value_key_sum[place] / count - np.outer(mean, mean_key)
        key_low, key_high, low, high = (field[place] for field in bounds)
        # The corners that the signs of the query choose.
        least = np.where(q > 0, key_low, key_high) @ q / root
        largest = np.where(q > 0, key_high, key_low) @ q / root
        mean_logit, spread = mean_key @ q / root, largest - least
        # Each end of the chord by its share of the way, the larger one as 1.
        ahead = min(1.0, max(0.0, (largest - mean_logit) / spread)) if spread > 0 else 0.0
        excess = max(1 - ahead + ahead * np.exp(-spread), np.exp(mean_logit - largest))
        # The retained mass beside that of the evicted tokens.
        with np.errstate(over="ignore"):
            light = 1 / (1 + np.exp(size - mean_logit) / count)
            heavy = 1 / (1 + np.exp(size - largest) / count / excess)
        inner = np.minimum(np.maximum(mean, low), high)
        radius = np.sqrt((high - inner) * (inner - low)) * np.sinh(min(spread / 2, 40.0))
        ends = np.maximum(low, inner - radius), np.minimum(high, inner + radius)
        products = [(1 - weight) * retained + weight * end for weight in (light, heavy) for end in ends]
        corrected = (1 - light) * retained + light * (mean + slope @ q / root)
        yield retained, corrected, np.minimum(products[0], products[2]), np.maximum(products[1], products[3])


def gathered(outputs, query, values):
    return np.array(list(outputs), dtype=values.dtype).reshape(*query.shape[:2], values.shape[-1])


@control("momentkv_bounded.attend")
def nearest_output(query, keys, values, kept, moments, bounds):
    """The output itself moved into the box of outputs, one
    query head after the other, the weights as quotients.
    """
    parts = by_reader(query, keys, values, kept, moments, bounds)
    return gathered(
        (np.minimum(np.maximum(paper, low), high) for _, paper, low, high in parts), query, values
    )


@control("momentkv_bounded.attend_certified")
def worst_corner(query, keys, values, kept, moments, bounds):
    """The worst corner of the box picked by the sign of the correction."""

    def outputs():
        for retained, paper, low, high in by_reader(query, keys, values, kept, moments, bounds):
            step = np.minimum(np.maximum(paper, low), high) - retained
            gain = step @ (np.where(step > 0, low, high) - retained)
            share = min(1.0, 2 * gain / (step @ step)) if gain > 0 else 0.0
            yield np.minimum(np.maximum(retained + share * step, low), high)

    return gathered(outputs(), query, values)


@control("momentkv_bounded.update", array_library="torch", dtypes=ALL)
def torch_by_order(bounds, keys, values, evicted):
    """torch: the tokens sorted in each channel, those that stay put at the end."""
    stays = ~evicted[..., None]
    ends = [
        pick(field, states.masked_fill(stays, worst).sort(dim=2, descending=worst < 0).values[:, :, 0])
        for field, states, pick, worst in zip(
            bounds,
            (keys, keys, values, values),
            (torch.minimum, torch.maximum) * 2,
            (math.inf, -math.inf) * 2,
            strict=True,
        )
    ]
    return Bounds(*ends)
