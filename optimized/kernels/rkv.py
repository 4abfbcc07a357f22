r"""R-KV's redundancy: RK-1 to RK-3, the cosines of every key
with all others, less the latest similar one of each key.

It equals, in torch:

    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    similarity = (unit @ unit.mT).fill_diagonal_(0)
    latest = torch.where(similarity > threshold, torch.arange(T), -1).amax(dim=-1)
    is_latest = latest[:, None] == torch.arange(T)
    total = similarity.masked_fill(is_latest, 0).sum(dim=-2)

The sum of a column of cosines is T times the product of a unit key with their mean, which the launches of
`keydiff` compute without the matrix. So the matrix is needed for the latest similar keys alone. One program
keeps a tile of keys and walks over the others, the last ones first, until each of its keys has found one.
Where most keys are similar to a late one, it walks over few tiles. The T x T cosines are never stored, and
their products are made on tensor cores.
"""

import torch
import triton
import triton.language as tl

from .compiling import HEAD_DIMS, configurations
from .keydiff import load_keys, partial_sums, score_against
from .launching import as_heads, cdiv, floats, is_amd, launch, launcher
from .received_attention import tile_of
from .strided import strided
from .tiles import head_of


@launcher
def totals(keys: torch.Tensor, threshold: float) -> torch.Tensor:
    r"""RK-1, RK-2: the sum of the cosines of each key
    [..., T, D], without those that are latest: [..., T], float64.
    """
    inverses = floats(keys, *keys.shape[:-1])
    sums = partial_sums(keys, inverses)
    scores = score_against(keys, sums, inverses)
    found, latest = _latest(keys, inverses, threshold)
    sizes = torch.linalg.vector_norm(sums.double().sum(dim=1), dim=-1).view(*keys.shape[:-2], 1)
    # Without the cosine of a key with itself. In float64 the order of the sums does not show.
    cosines = scores.double().mul_(-sizes).sub_(inverses.sign())
    return cosines.scatter_add_(-1, latest.clamp_(min=0), found.double().neg_())


def _latest(
    keys: torch.Tensor, inverses: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosine of every key with its latest similar one, 0 without one, and the place of that, or
    -1: [..., T].
    """
    heads = as_heads(keys)
    (batch, num_heads, length, head_dim), tile = heads.shape, tile_of(heads, 128)
    found, latest = floats(keys, *keys.shape[:-1]), keys.new_empty(keys.shape[:-1], dtype=torch.int64)
    launch(find_latest, (batch * num_heads * cdiv(length, tile["BLOCK_ROWS"]),))(
        strided(heads), inverses, found, latest, threshold, num_heads, length, head_dim,
        **tile | {"BLOCK_T": min(16 if is_amd(keys) else 32, tile["BLOCK_T"])},
    )  # fmt: skip
    return found, latest


@triton.jit(do_not_specialize=["length"])
def find_latest(
    keys, inverses_ptr, found_ptr, latest_ptr, limit, num_heads, length, head_dim,
    BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """latest[head, row] = the last token whose cosine with the row is above the limit, or -1, and found
    has the cosine. Grid: heads * tiles of rows.
    """
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(length, BLOCK_ROWS)
    head, start = program // tiles, (program % tiles).to(tl.int32) * BLOCK_ROWS
    row, own = start + tl.arange(0, BLOCK_ROWS), head_of(keys, head, num_heads)
    inverses_ptr += head * length
    mine = load_keys(own, start, length, head_dim, BLOCK_ROWS, BLOCK_D).to(DOT_DTYPE)
    inverse = tl.load(inverses_ptr + row, mask=row < length, other=0.0)
    found, latest = tl.zeros([BLOCK_ROWS], dtype=tl.float32), tl.where(row < length, -1, 0)
    first = (length - 1) // BLOCK_T * BLOCK_T
    while (first >= 0) & (tl.min(latest, axis=0) < 0):
        token = first + tl.arange(0, BLOCK_T)
        others = load_keys(own, first, length, head_dim, BLOCK_T, BLOCK_D).to(DOT_DTYPE)
        cosine = tl.dot(others, tl.trans(mine), input_precision="ieee") * inverse
        cosine *= tl.load(inverses_ptr + token, mask=token < length, other=0.0)[:, None]
        # A token after the last one is similar to no row, whatever the limit.
        similar = (cosine > limit) & (token[:, None] != row) & (token < length)[:, None] & (latest < 0)
        place = tl.max(tl.where(similar, token[:, None], -1), axis=0)
        found += tl.sum(tl.where(token[:, None] == place, cosine, 0.0), axis=0)
        latest = tl.maximum(latest, place)
        first -= BLOCK_T
    tl.store(found_ptr + head * length + row, found, mask=row < length)
    tl.store(latest_ptr + head * length + row, latest.to(tl.int64), mask=row < length)


def _launch(dtype: torch.dtype, head_dim: int) -> None:
    keys = torch.empty((2, 8, 4096, head_dim), dtype=dtype, device="meta")
    _latest(keys, floats(keys, 2, 8, 4096), 0.5)


CONFIGURATIONS = configurations(
    _launch, *({"head_dim": head_dim} for head_dim in HEAD_DIMS), tensor_cores=["find_latest"]
)
