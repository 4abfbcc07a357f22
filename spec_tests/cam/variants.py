"""Right CaMs of other forms."""

from evictionary.spec_tests.shared.variants import *


@control("cam.probabilities", array_library="torch", dtypes=ALL)
@in_float32
def ratio_repaired_at_the_end(attention, kept, *, merge_size=32):
    """Token by token; infinity and NaN are replaced when they are there."""
    found = torch.zeros_like(attention)
    for *head, token in (~kept).nonzero().tolist():
        if len(later := attention[*head, token:][kept[*head, token:]][:merge_size]):
            found[*head, token] = (attention[*head, token] / later.mean()).nan_to_num(0, 1).clamp(max=1)
    return found


@control("cam.spread", array_library="torch", dtypes=ALL)
@through_float32
def one_token_after_another(values, kept, weights, *, merge_size=32):
    """As a cache that evicts them one by one, from the last to the first."""
    found = values.clone()
    for *head, token in reversed((~kept).nonzero().tolist()):
        later = token + kept[*head, token:].nonzero()[:merge_size, 0]
        found[*head, later] += weights[*head, token] * values[*head, token] / max(1, len(later))
    return found


@control("cam.merge_values", array_library="torch", dtypes=ALL)
@through_float32
def compared_without_a_division(values, attention, kept, draws, *, merge_size=32):
    """A draw times the attention of the receivers, beside the attention of the evicted token times m."""
    before = kept.cumsum(-1)
    place = before[..., None, :] - before[..., None]
    receives = ((place > 0) & (place <= merge_size) & kept[..., None, :] & ~kept[..., None]).to(values.dtype)
    count, total = receives.sum(-1), (receives @ attention[..., None])[..., 0]
    merged = (draws * total < attention * count) & (draws < 1)
    return values + (receives * (merged / count.clamp(min=1))[..., None]).mT @ values
