"""Correct R-KVs of other kinds."""

from evictionary.reference import rkv
from evictionary.spec_tests.shared.forms import softmax_by_maximum
from evictionary.spec_tests.shared.variants import *
from evictionary.spec_tests.snapkv.variants import before_a_window_of, window_above_the_rest

REDUNDANCY, IMPORTANCE, SCORE = "rkv.redundancy", "rkv.importance", "rkv.score"


@control(REDUNDANCY, dtypes=NUMPY)
def row_by_row(keys, *, threshold=0.5):
    """One key after the other says what it thinks of the
    others; its latest similar key is found from the end.
    """
    norms = np.sqrt(np.einsum("...d,...d->...", keys, keys))
    directions = keys / np.where(norms == 0, 1, norms)[..., None]
    totals = np.zeros(keys.shape[:-1], keys.dtype)
    for place in range(keys.shape[-2]):
        said = np.einsum("...td,...d->...t", directions, directions[..., place, :])
        said[..., place] = 0
        for row in said.reshape(-1, keys.shape[-2]):
            row[[other for other in range(row.size) if row[other] > threshold][-1:]] = 0
        totals += said
    return softmax_by_maximum(totals / keys.dtype.type(keys.shape[-2]))


@control(REDUNDANCY, array_library="torch", dtypes=ALL)
@through_float32
def torch_at_once(keys, *, threshold=0.5):
    """The whole matrix, the latest similar key by a cumulative count from the end."""
    norms = keys.norm(dim=-1, keepdim=True)
    directions = keys / norms.where(norms > 0, 1)
    similarity = directions @ directions.mT
    similarity.diagonal(dim1=-2, dim2=-1).zero_()
    similar = similarity > threshold
    similarity[similar & (similar.flip(-1).cumsum(-1).flip(-1) == 1)] = 0
    return similarity.mean(dim=-2).softmax(dim=-1)


@control(IMPORTANCE, dtypes=NUMPY)
def query_by_query(queries, keys, *, window_size=8, kernel_size=7):
    """The queries of the window one after the other, from the last; the neighbours by a sliding window."""
    before = keys[:, :, :-window_size] / keys.dtype.type(keys.shape[-1] ** 0.5)
    group = queries.shape[1] // keys.shape[1]
    total = np.zeros(before.shape[:-1], before.dtype)
    for place in range(-1, -window_size - 1, -1):
        logits = np.stack(
            [np.einsum("bhtd,bhd->bht", before, queries[:, g::group, place]) for g in range(group)]
        )
        total = total + softmax_by_maximum(logits.max(axis=0))
    padded = np.pad(total, [(0, 0), (0, 0), (kernel_size // 2, kernel_size // 2)])
    return np.lib.stride_tricks.sliding_window_view(padded, kernel_size, axis=-1).max(
        axis=-1
    ) / keys.dtype.type(window_size)


@control(IMPORTANCE, array_library="torch", dtypes=ALL)
@through_float32
def torch_by_logarithms(queries, keys, *, window_size=8, kernel_size=7):
    """The weights as exp(logit - log Z), the neighbours by a pooling layer."""
    recent = queries[:, :, -window_size:].unflatten(1, (keys.shape[1], -1))
    logits = (recent @ keys[:, :, None, :-window_size].mT).amax(dim=2) / keys.shape[-1] ** 0.5
    received = (logits - logits.logsumexp(dim=-1, keepdim=True)).exp().mean(dim=-2)
    return torch.nn.functional.max_pool1d(received, kernel_size, stride=1, padding=kernel_size // 2)


@control(SCORE, dtypes=NUMPY)
@before_a_window_of(8)
def in_parts(queries, keys, *, kernel_size=7, importance_share=0.07, threshold=0.5):
    """The two parts from the variants above, mixed as R + lambda (I - ...)."""
    repeated = row_by_row(keys, threshold=threshold)[..., : -queries.shape[2]]
    attended = query_by_query(queries, keys, window_size=queries.shape[2], kernel_size=kernel_size)
    return importance_share * (attended + repeated) - repeated


@control(SCORE, array_library="torch", dtypes=ALL)
@through_float32
@before_a_window_of(8)
def torch_score(queries, keys, *, kernel_size=7, importance_share=0.07, threshold=0.5):
    """The maximum of the neighbours by unfolding."""
    before, reach = slice(None, -queries.shape[2]), kernel_size // 2
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    logits = torch.einsum("bhgmd,bhtd->bhgmt", grouped, keys[:, :, before]) / keys.shape[-1] ** 0.5
    received = logits.amax(dim=2).softmax(dim=-1).mean(dim=2)
    attended = torch.nn.functional.pad(received, (reach, reach)).unfold(-1, kernel_size, 1).amax(dim=-1)
    repeated = torch_at_once(keys, threshold=threshold)[..., before]
    return importance_share * attended - (1 - importance_share) * repeated


control(SCORE, array_library="torch", dtypes=ALL, name="torch_window_above_the_rest")(
    window_above_the_rest(torch_score)
)


@control("rkv_variants.released_score", dtypes=NUMPY)
@before_a_window_of(8)
def released_by_rows(queries, keys, *, kernel_size=7, importance_share=0.07, threshold=0.5):
    """The score of the reference, and what token 0 gains
    where no key is similar put right in the column sums.
    """
    attended = rkv.importance(queries, keys, window_size=queries.shape[2], kernel_size=kernel_size)
    similarity = rkv.similarities(keys)
    sums = rkv.without_latest(similarity, threshold).sum(axis=-2)
    sums[..., 0] -= np.where(~(similarity > threshold).any(axis=-1), similarity[..., 0], 0).sum(axis=-1)
    repeated = softmax_by_maximum(sums / keys.shape[-2])[..., : -queries.shape[2]]
    return importance_share * attended - (1 - importance_share) * repeated
