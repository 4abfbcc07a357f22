"""Right Quests of other forms."""

from evictionary.spec_tests.shared.forms import top_by_sorted
from evictionary.spec_tests.shared.variants import *


@control("quest.page_bounds", array_library="torch", dtypes=ALL)
def filled_up_with_the_last_key(keys, *, page_size=16):
    """The last page is filled up with its own last key, which changes no bound."""
    more = keys[:, :, -1:].expand(-1, -1, -keys.shape[2] % page_size, -1)
    pages = torch.cat([keys, more], dim=2).unflatten(2, (-1, page_size))
    return pages.amin(dim=3), pages.amax(dim=3)


@control("quest.select", edges=False)
def last_page_apart(query, keys, layer_index, *, budget, page_size=16, skipped_layers=2):
    """As in the public kernels: the best of the pages before the last, and the last page beside them."""
    length, whole = keys.shape[2], (keys.shape[2] - 1) // page_size * page_size
    if budget >= length or layer_index < skipped_layers:
        return np.ones((*query.shape[:2], length), dtype=bool)
    keys = np.repeat(keys, query.shape[1] // keys.shape[1], axis=1)[:, :, :whole]
    # the keys with the signs of the query: their largest numbers bound it
    sign = np.where(query > 0, 1, -1)
    pages = (
        (keys * sign[:, :, None])
        .reshape(*query.shape[:2], whole // page_size, page_size, query.shape[-1])
        .max(axis=3)
    )
    best = top_by_sorted((pages @ (query * sign)[..., None])[..., 0], max(1, budget // page_size) - 1)
    return np.pad(
        best.repeat(page_size, axis=-1), ((0, 0), (0, 0), (0, length - whole)), constant_values=True
    )


@control("quest.attend", array_library="torch", dtypes=ALL)
@through_float32
def torch_mask(query, keys, values, attended):
    """torch's own attention with a boolean mask."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query[:, :, None], keys, values, attn_mask=attended[:, :, None])[:, :, 0]
