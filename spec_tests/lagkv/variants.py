"""Correct LagKVs of other kinds."""

from evictionary.reference.lagkv import Stream
from evictionary.spec_tests.lagkv import forms
from evictionary.spec_tests.shared import forms as shared
from evictionary.spec_tests.shared.variants import *

SCORE, SELECT, RETAINED, STEP = "lagkv.score", "lagkv.select", "lagkv.retained_length", "lagkv.step"
PAIRS = {"normalise": forms.normalise_by_divide, "deviation": forms.deviation_of_pairs}
WALKING = {"normalise": forms.normalise_token_by_token, "softmax": shared.softmax_by_log_sum_exp}

control(SCORE, dtypes=NUMPY, name="running_extremes")(put_together(forms, "score", **WALKING))
control(SCORE, dtypes=NUMPY, name="log_add_exp")(
    put_together(forms, "score", softmax=shared.softmax_by_log_add_exp)
)
sums_of_squares = control(SCORE, dtypes=NUMPY, name="sums_of_squares")(put_together(forms, "score", **PAIRS))
control("lagkv.normalise", dtypes=NUMPY, name="inverted_range")(forms.normalise_by_reciprocal)
control(SELECT, name="partition_by_partition")(
    put_together(forms, "select", top=shared.top_by_repeated_argmax, **WALKING)
)
control(RETAINED, name="in_float_with_a_guard")(
    put_together(forms, "retained_length", share=forms.floor_in_float_with_a_guard)
)


def torch_scorer(part, name, **claims):
    """Register a score by its part: what the keys, and likewise the values, of a partition have against
    the next one.
    """

    def score(keys, values, next_keys, next_values):
        return part(keys, next_keys) + part(values, next_values)

    control(SCORE, array_library="torch", name=name, **claims)(score)
    return score


def torch_deviation(states, following):
    low, high = following.aminmax(dim=-2, keepdim=True)
    scaled = torch.where(high == low, 0, (states - low) / torch.where(high == low, 1, high - low))
    return scaled.std(dim=-1) if scaled.shape[-1] > 1 else torch.zeros_like(scaled[..., 0])


def torch_part(states, following):
    return torch_deviation(states, following).softmax(dim=-1)


@in_float32
def torch_logarithm_of_shares(states, following):
    return torch_deviation(states, following).log_softmax(dim=-1).exp()


torch_eager = torch_scorer(torch_part, "torch_eager", dtypes=("float64", "float32", "bfloat16"))


@in_float32
def torch_tiles(states, following):
    """Tokens before heads, both partitions filled up to tiles of 16 that are masked."""

    def tiles(states, filling):
        first = states.movedim(-2, 0)
        return torch.cat(
            [first, torch.full((-len(first) % 16, *first.shape[1:]), filling, dtype=first.dtype)]
        )

    low = tiles(following, torch.inf).unflatten(0, (-1, 16)).amin(dim=1).amin(dim=0)
    spread = tiles(following, -torch.inf).unflatten(0, (-1, 16)).amax(dim=1).amax(dim=0) - low
    scaled = torch.where(spread == 0, 0, (tiles(states, 7.0) - low) / torch.where(spread == 0, 1, spread))
    centred = scaled - scaled.mean(dim=-1, keepdim=True)
    deviation = ((centred * centred).sum(dim=-1) / max(1, scaled.shape[-1] - 1)).sqrt()
    deviation[states.shape[-2] :] = -torch.inf
    return deviation.softmax(dim=0)[: states.shape[-2]].movedim(0, -1)


torch_scorer(torch_logarithm_of_shares, "torch_log_softmax", dtypes=ALL)
torch_scorer(torch_tiles, "torch_padded_and_permuted", dtypes=ALL)


def torch_sorted(keys, values, keep_ratio, sink_size, lag_size, scored):
    """All partitions at once, a stable sort for the best; `scored` has the arguments of `score`."""
    kept = torch.ones(keys.shape[:3], dtype=torch.bool)
    partitions = (keys.shape[2] - sink_size) // lag_size
    if partitions >= 2:
        end = sink_size + partitions * lag_size
        parts = [
            states[:, :, sink_size:end].unflatten(2, (partitions, lag_size)) for states in (keys, values)
        ]
        scores = scored(*(part[:, :, :-1] for part in parts), *(part[:, :, 1:] for part in parts))
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        kept[:, :, sink_size : end - lag_size] = (rank < forms.share(keep_ratio, lag_size)).flatten(2)
    return kept


@control(SELECT, array_library="torch", dtypes=("float64", "float32", "bfloat16"))
def torch_select(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    return torch_sorted(keys, values, keep_ratio, sink_size, lag_size, torch_eager)


@control("lagkv.keep_ratio_for")
def searched(length, budget, *, sink_size=16, lag_size=1024):
    """The largest count of a partition that fits, by bisection."""
    lengths = {"sink_size": sink_size, "lag_size": lag_size}
    if (
        forms.length_by_what_is_removed(length, keep_ratio=1, **lengths) <= budget
        or length < sink_size + 2 * lag_size
    ):
        return Fraction(1)
    low, high = 0, lag_size
    while high - low > 1:
        middle = (low + high) // 2
        fits = (
            forms.length_by_what_is_removed(length, keep_ratio=Fraction(middle, lag_size), **lengths)
            <= budget
        )
        low, high = (middle, high) if fits else (low, middle)
    return Fraction(low, lag_size)


@control(STEP, max_length=4096)
def token_by_token(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    """Tokens enter one at a time; a partition is compressed at the moment when the next one is full."""
    count, heads = forms.share(keep_ratio, lag_size), keys.shape[:2]
    if stream is None:
        stream = Stream(keys[:, :, :0], values[:, :, :0], np.zeros((*heads, 0), dtype=int), sink_size, 0)
    *rows, static, seen = stream
    for token in range(keys.shape[2]):
        new = (
            keys[:, :, token : token + 1],
            values[:, :, token : token + 1],
            np.full((*heads, 1), seen + token),
        )
        rows = [np.concatenate(pair, axis=2) for pair in zip(rows, new, strict=True)]
        if rows[0].shape[2] == static + 2 * lag_size:
            own, following = slice(static, static + lag_size), slice(static + lag_size, None)
            scores = forms.score(
                rows[0][:, :, own], rows[1][:, :, own], rows[0][:, :, following], rows[1][:, :, following]
            )
            kept = np.ones(rows[2].shape, dtype=bool)
            kept[:, :, own] = forms.top(scores, count)
            rows = [entry[kept].reshape(*heads, -1, *entry.shape[3:]) for entry in rows]
            static += count
    return Stream(rows[0], rows[1], rows[2], static, seen + keys.shape[2])


@control("lagkv_theory.attention_weights", array_library="torch", dtypes=("float64", "float32"))
def torch_masked_softmax(queries, keys):
    logits = torch.einsum("...md,...td->...mt", queries / math.sqrt(keys.shape[-1]), keys)
    return logits.masked_fill(hidden(*logits.shape[-2:]), -torch.inf).softmax(dim=-1)


@control("lagkv_theory.attention_output", dtypes=NUMPY)
def head_by_head(weights, values, output_weight):
    """The sum over the heads, each with its own rows of W_O."""
    rows = np.split(output_weight, weights.shape[-3], axis=-2)
    return sum(weights[..., head, :, :] @ (values[..., head, :, :] @ own) for head, own in enumerate(rows))


@control("lagkv_theory.project", array_library="torch", dtypes=ALL)
def torch_one_matrix(states, query_weight, key_weight, value_weight):
    joined = torch.cat([query_weight, key_weight, value_weight], dim=-1)
    return tuple(
        (states @ joined).split(
            [query_weight.shape[-1], key_weight.shape[-1], value_weight.shape[-1]], dim=-1
        )
    )


@control("lagkv_variants.local_score", dtypes=NUMPY)
def sums_of_squares_against_itself(keys, values):
    return sums_of_squares(keys, values, keys, values)


@control("lagkv_variants.local_select", array_library="torch", dtypes=("float64", "float32", "bfloat16"))
def torch_local_select(keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    return torch_sorted(
        keys, values, keep_ratio, sink_size, lag_size, lambda own, also, *_: torch_eager(own, also, own, also)
    )


@control("lagkv_variants.norm_select", array_library="torch", dtypes=ALL)
def torch_norm_select(keys, values, *, layer, keep_ratio, sink_size=16, lag_size=1024, skipped_layers=2):
    kept = torch_sorted(
        keys, values, keep_ratio, sink_size, lag_size, lambda own, *_: -own.float().norm(dim=-1)
    )
    return kept | (layer < skipped_layers)
