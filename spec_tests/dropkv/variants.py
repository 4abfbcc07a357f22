"""Correct DropKVs of other kinds."""

from evictionary.spec_tests.shared.forms import softmax_by_maximum
from evictionary.spec_tests.shared.variants import *
from evictionary.spec_tests.snapkv.variants import (
    before_a_window_of,
    convolved,
    torch_pooled,
    window_above_the_rest,
)

SCORE = "dropkv.score"


@control(SCORE, dtypes=NUMPY, max_length=512)
@before_a_window_of(32)
def leaving_each_out(queries, keys, values, *, kernel_size=7):
    """The attention computed again without each token, as the law says it."""
    length, group, window = keys.shape[2], queries.shape[1] // keys.shape[1], queries.shape[2]
    total = np.zeros(keys.shape[:3], keys.dtype)
    for item, reader, row in np.ndindex(queries.shape[:3]):
        place, seen = (item, reader // group), length - window + row + 1
        logits = keys[place][:seen] @ (queries[item, reader, row] / keys.dtype.type(keys.shape[-1] ** 0.5))
        masked = np.where(np.eye(seen, dtype=bool), -np.inf, logits)
        changes = softmax_by_maximum(logits)[:, None] * (
            values[place][:seen] - softmax_by_maximum(masked) @ values[place][:seen]
        )
        total[place][:seen] += (changes * changes).sum(axis=-1)
    return convolved(total / group, kernel_size)[..., :-window]


def torch_changes(queries, keys, values):
    """|o without j - o|^2 of each query of the window, [B, H_q, W, T], by the log of p / (1 - p)."""
    group, window = queries.shape[1] // keys.shape[1], queries.shape[2]
    keys, values = (states.repeat_interleave(group, dim=1) for states in (keys, values))
    logits = queries @ keys.mT / keys.shape[-1] ** 0.5
    logits = logits.masked_fill(hidden(window, keys.shape[2]), -torch.inf)
    top, place = logits.max(dim=-1, keepdim=True)
    powers = (logits - top).exp()
    rest = powers.scatter(-1, place, 0)
    total = rest.sum(dim=-1, keepdim=True) + 1
    output = powers @ values / total
    without = logits.scatter(-1, place, -torch.inf).softmax(dim=-1) @ values
    odds = rest / (total - rest)
    changes = odds.square() * (values.unsqueeze(2) - output.unsqueeze(3)).square().sum(dim=-1)
    chosen = (
        values.unsqueeze(2)
        .expand(-1, -1, window, -1, -1)
        .gather(3, place.unsqueeze(-1).expand(*place.shape, values.shape[-1]))
    )
    return changes.scatter(
        -1, place, (chosen[:, :, :, 0] - without).square().sum(dim=-1, keepdim=True) / total.square()
    )


@control(SCORE, array_library="torch", dtypes=ALL)
@through_float32
@before_a_window_of(32)
def torch_by_odds(queries, keys, values, *, kernel_size=7):
    """torch, the softmax never normalised."""
    total = torch_changes(queries, keys, values).sum(dim=2).unflatten(1, (keys.shape[1], -1)).mean(dim=2)
    return torch_pooled(total, kernel_size)[..., : -queries.shape[2]]


control(SCORE, array_library="torch", dtypes=ALL, name="torch_window_above_the_rest")(
    window_above_the_rest(torch_by_odds)
)
