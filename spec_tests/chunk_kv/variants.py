"""Right ChunkKVs of other forms."""

from evictionary.spec_tests.shared.variants import *


@control("chunk_kv.chunk_means")
def filled_up(scores, *, chunk_size=10):
    """The last chunk is filled up; the mean leaves out what is not there."""
    short = np.full((*scores.shape[:-1], -scores.shape[-1] % chunk_size), np.nan)
    chunks = np.concatenate([scores, short], axis=-1).reshape(*scores.shape[:-1], -1, chunk_size)
    there = ~np.isnan(chunks)
    with np.errstate(invalid="ignore"):
        means = np.where(there, chunks, 0).sum(axis=-1) / there.sum(axis=-1)
    return np.where(np.isnan(means), np.inf, means)


@control("chunk_kv.choose", max_length=4096)
def chunk_by_chunk(scores, budget, *, chunk_size=10):
    """The best chunk that is left, until the budget is full."""
    kept = np.zeros(scores.shape, dtype=bool)
    for row in np.ndindex(scores.shape[:-1]):
        left = [
            range(start, min(start + chunk_size, scores.shape[-1]))
            for start in range(0, scores.shape[-1], chunk_size)
        ]
        while left and (rest := budget - int(kept[row].sum())) > 0:
            best = max(left, key=lambda chunk: (mean(scores[row][chunk.start : chunk.stop]), -chunk.start))
            kept[row][sorted(best, key=lambda token: -scores[row][token])[:rest]] = True
            left.remove(best)
    return kept


def mean(scores):
    return np.inf if np.inf in scores else float(np.mean(scores))


@control("chunk_kv.choose", array_library="torch", dtypes=ALL)
def whole_chunks_then_tokens(scores, budget, *, chunk_size=10):
    """A token ranks by the place of its chunk, and in its chunk by its score."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    parts = wide.split(chunk_size, dim=-1)
    means = torch.stack([part.mean(dim=-1) for part in parts], dim=-1).nan_to_num(
        torch.inf, torch.inf, -torch.inf
    )
    chunk_place = means.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    by_score = wide.argsort(dim=-1, descending=True, stable=True)
    order = by_score.gather(-1, chunk_place.gather(-1, by_score // chunk_size).argsort(dim=-1, stable=True))
    return torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, order[..., :budget], True)
