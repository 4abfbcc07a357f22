"""Correct TriAttentions of other kinds."""

from evictionary.spec_tests.rope.variants import torch_angles, torch_turned
from evictionary.spec_tests.shared.variants import *

STATISTICS, AVERAGE, LOGITS, SCORE = (
    f"triattention.{name}" for name in ("statistics", "average_over_offsets", "logits", "score")
)


@control(STATISTICS, dtypes=NUMPY)
def query_by_query(queries):
    """Complex numbers, added up one query after the other."""
    half, rows = queries.shape[-1] // 2, np.moveaxis(queries, -2, 0)
    pairs = rows[..., :half] + 1j * rows[..., half:]
    mean, length = sum(pairs) / len(pairs), sum(map(np.abs, pairs)) / len(pairs)
    return np.concatenate([mean.real, mean.imag], axis=-1).astype(queries.dtype), (
        length - np.abs(mean)
    ).astype(queries.dtype)


@control(AVERAGE, array_library="torch", dtypes=ALL)
@through_float32
def torch_tables(query_mean, *, position, max_offset=65536, theta=10000.0):
    """With the tables of RoPE as transformers makes them, all offsets at once."""
    angles = torch_angles(query_mean, position + 2 ** torch.arange(max_offset.bit_length()), theta)
    return torch_turned(query_mean[..., None, :], angles).mean(dim=-2)


@control(LOGITS, array_library="torch", dtypes=ALL)
@in_float32
def torch_pair_by_pair(keys, query_direction, query_slack):
    """Each pair's product and bonus added, then all pairs."""
    pairs, direction = (states.unflatten(-1, (2, -1)) for states in (keys, query_direction))
    products = (pairs * direction[..., None, :, :]).sum(dim=-2)
    return (products + pairs.norm(dim=-2) * query_slack[..., None, :]).sum(dim=-1)


@control(SCORE, array_library="torch", dtypes=ALL)
@in_float32
def torch_with_longer_keys(keys, query_direction, query_slack):
    """The lengths of the pairs as further channels, one product for both parts."""
    longer = torch.cat([keys, keys.unflatten(-1, (2, -1)).norm(dim=-2)], dim=-1)
    readers = torch.cat([query_direction, query_slack], dim=-1).unflatten(1, (keys.shape[1], -1))
    rows = torch.einsum("bhgc,bhtc->bhgt", readers, longer)
    deviation, mean = torch.std_mean(rows, dim=-1, correction=0, keepdim=True)
    return ((rows - mean) / deviation.clamp(min=1e-6)).amax(dim=2)
