"""Laws of the functions in momentkv_theory: each equation
of sections 2, 3 and the appendices, against plain loops.
"""

from evictionary.reference.momentkv_theory import Expansion, logits_of
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.momentkv.helpers import some

heads = st.builds(
    Case,
    kind=st.sampled_from(
        [
            "normal",
            "ties",
            "duplicate_keys",
            "zero_keys",
            "cancelling_keys",
            "constant_channel",
            "tiny",
            "drift",
        ]
    ),
    seed=seeds(),
    num_kv_heads=st.integers(1, 2),
    length=st.sampled_from([1, 2, 3, 7, 16, 33]),
    head_dim=st.sampled_from([1, 2, 4, 9]),
    value_dim=st.sampled_from([1, 2, 5]),
)


def one_query(impl, case):
    """Query, keys and values of a case, as the dtype holds them; one query for each KV head."""
    return impl.round(case.queries[:, :, 0]), impl.round(case.keys), impl.round(case.values)


def halves(impl, case, seed):
    """The same with a mask that keeps at least one token
    and evicts at least one; a case of one token is doubled.
    """
    query, keys, values = one_query(impl, case)
    if keys.shape[2] == 1:
        keys, values = np.concatenate([keys, keys], axis=2), np.concatenate([values, -values], axis=2)
    kept = some(case, seed, keys.shape[:3])
    kept[..., 0], kept[..., -1] = True, False
    return query, keys, values, kept


def over_heads(function):
    """The function of one head applied to every head."""

    def applied(*arrays):
        places = np.ndindex(arrays[0].shape[:2])
        found = np.array([function(*(array[place] for array in arrays)) for place in places])
        return found.reshape(*arrays[0].shape[:2], *found.shape[1:])

    return applied


def weights_of(query, keys):
    """The exponentials of the logits of one head, less the largest, and the largest."""
    logits = [math.fsum(query * key) / math.sqrt(len(query)) for key in keys]
    return np.array([math.exp(logit - max(logits)) for logit in logits]), max(logits)


def output_of(query, keys, values):
    weights, _ = weights_of(query, keys)
    return weights @ values / weights.sum()


def centre(query, keys):
    return [float(query @ (key - keys.mean(axis=0))) / math.sqrt(len(query)) for key in keys]


@law("MK-1", of="momentkv_theory.full_output", case=heads)
def test_the_full_output_is_attention_over_all_tokens(impl, case):
    """sum exp(s_i) v_i / Z."""
    agrees(impl, "momentkv_theory.full_output", *one_query(impl, case), also=over_heads(output_of))


@law("MK-2", of="momentkv_theory.sub_outputs", case=heads, seed=seeds())
def test_the_sub_outputs_are_attention_over_each_set(impl, case, seed):
    """f_R over the retained tokens alone and f_E over the evicted ones alone."""
    states = halves(impl, case, seed)
    retained = over_heads(lambda query, keys, values, kept: output_of(query, keys[kept], values[kept]))
    evicted = over_heads(lambda query, keys, values, kept: output_of(query, keys[~kept], values[~kept]))
    agrees(impl, "momentkv_theory.sub_outputs", *states, pick=0, also=retained, what="f_R")
    agrees(impl, "momentkv_theory.sub_outputs", *states, pick=1, also=evicted, what="f_E")


@law("MK-2", of="momentkv_theory.sub_outputs", kind="refusal", keeps=st.booleans())
def test_an_empty_set_has_no_output(impl, keeps):
    """A row that keeps every token, or none, raises ValueError."""
    states, kept = np.ones((1, 1, 3, 2)), np.full((1, 1, 3), keeps)
    refused(impl, "kept", "momentkv_theory.sub_outputs", states[:, :, 0], states, states, kept)


def of_the_mixture(impl, query, keys, values, kept):
    """What w_R f_R + w_E f_E may differ from f by: what masses, sub-outputs and output may be wrong by."""
    slack = impl.allowance("momentkv_theory.full_output", query, keys, values).largest
    size = np.abs(values).max()
    for pick in (0, 1):
        slack += size * impl.allowance("momentkv_theory.mass", query, keys, kept, pick=pick).largest
        slack += impl.allowance("momentkv_theory.sub_outputs", query, keys, values, kept, pick=pick).largest
    return slack + 1e-12 * max(1.0, size)


@law(
    "MK-3",
    of=("momentkv_theory.mass", "momentkv_theory.sub_outputs", "momentkv_theory.full_output"),
    case=heads,
    seed=seeds(),
)
def test_the_output_is_the_mixture_of_the_sub_outputs(impl, case, seed):
    """w_R and w_E are the shares of the partition function, sum to 1, and w_R f_R + w_E f_E = f."""
    query, keys, values, kept = halves(impl, case, seed)

    def shares(query, keys, kept):
        weights, _ = weights_of(query, keys)
        return weights[kept].sum() / weights.sum(), weights[~kept].sum() / weights.sum()

    expected = over_heads(shares)(query, keys, kept)
    got = impl.momentkv_theory.mass(query, keys, kept)
    outputs = impl.momentkv_theory.sub_outputs(query, keys, values, kept)
    full = impl.momentkv_theory.full_output(query, keys, values)
    for pick, what in enumerate(("w_R", "w_E")):
        share = {"pick": pick, "got": got[pick], "also": expected[..., pick], "what": what}
        agrees(impl, "momentkv_theory.mass", query, keys, kept, **share)
    mixed = sum(part[..., None] * output for part, output in zip(got, outputs, strict=True))
    near(mixed, full, of_the_mixture(impl, query, keys, values, kept), "w_R f_R + w_E f_E")


vectors = st.lists(st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0]), min_size=3, max_size=3).map(
    lambda row: np.array([row])
)
fractions = st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 1.0]).map(lambda share: np.array([share]))


@law("MK-4", of="momentkv_theory.eviction_error", retained=vectors, evicted=vectors, share=fractions)
def test_the_eviction_error_is_mass_times_divergence(impl, retained, evicted, share):
    """f - f_R = w_E (f_E - f_R), with f the mixture."""
    expected = (1 - share) * retained + share * evicted - retained
    agrees(impl, "momentkv_theory.eviction_error", retained, evicted, share, also=expected)


@law("MK-5", of="momentkv_theory.split_divergence", retained=vectors.filter(np.any), evicted=vectors)
def test_the_divergence_splits_along_the_retained_output(impl, retained, evicted):
    """Parallel part (|f_E| cos / |f_R| - 1) f_R and
    perpendicular part of length |f_E| sin; together f_E - f_R.
    """
    size, other = np.linalg.norm(retained), np.linalg.norm(evicted)
    cosine = float(retained[0] @ evicted[0]) / (size * other) if other else 0.0
    path, parallel = "momentkv_theory.split_divergence", (other / size * cosine - 1) * retained
    across, area = evicted - retained - parallel, np.cross(retained, evicted)
    agrees(impl, path, retained, evicted, pick=0, also=parallel, what="the parallel part")
    got = agrees(impl, path, retained, evicted, pick=1, also=across, what="the perpendicular part")
    slack = within(impl, pick=1, roundings=0, times=4)
    near(lengths(got), lengths(area) / size, slack, "the length of the perpendicular part, |f_E| sin,")


@law("MK-5", of="momentkv_theory.split_divergence", kind="refusal")
def test_a_retained_output_of_zero_is_refused(impl):
    """A zero f_R, which has no direction, raises ValueError."""
    refused(impl, "retained_output", "momentkv_theory.split_divergence", np.zeros((1, 3)), np.ones((1, 3)))


@law(
    "MK-6",
    of="momentkv_theory.squared_error",
    retained=vectors.filter(np.any),
    evicted=vectors,
    share=fractions,
)
def test_the_squared_error_follows_pythagoras(impl, retained, evicted, share):
    """The two parts add up to w_E^2 |f_E - f_R|^2."""
    expected = share**2 * sum((a - b) ** 2 for a, b in zip(evicted[0], retained[0], strict=True))
    agrees(impl, "momentkv_theory.squared_error", retained, evicted, share, also=expected)


@law("MK-7", of="momentkv_theory.amplification", retained=vectors, evicted=vectors, share=fractions)
def test_the_relative_error_is_mass_times_amplification(impl, retained, evicted, share):
    """w_E gamma = |f - f_R| / |f|, gamma = |f_E - f_R| / |f|."""
    full = (1 - share) * retained + share * evicted
    assume(full.any())
    expected, relative = (lengths(each - retained) / lengths(full) for each in (evicted, full))
    agrees(impl, "momentkv_theory.amplification", retained, evicted, share, also=expected)
    loops(share * expected, relative, size=relative)


@law(
    "MK-13",
    of="momentkv_theory.shifted_softmax",
    case=heads,
    shift=st.sampled_from([-1024.0, -2.0, 0.5, 1024.0]),
)
def test_a_shift_of_all_logits_changes_no_weight(impl, case, shift):
    """softmax(s + c) = softmax(s)."""
    logits = np.clip(np.round(case.keys * 4) / 4, -8, 8)
    shift = math.copysign(min(abs(shift), 2.0), shift) if impl.dtype in ("float16", "bfloat16") else shift
    weights = np.array([math.exp(logit) for logit in logits.flat]).reshape(logits.shape)
    expected = weights / weights.sum(axis=-1, keepdims=True)
    agrees(impl, "momentkv_theory.shifted_softmax", logits, shift, also=expected)


CENTRED = "momentkv_theory.centred_logits"


def less_the_mean_logit(query, keys):
    logits = logits_of(query, keys)
    return logits - logits.mean(axis=-1, keepdims=True)


def centred_late(impl, query, keys):
    """What centred logits may be wrong by where the logits are centred, and not the keys."""
    holds = {"dtype": impl.dtype, "unrepresentable": impl.unrepresentable}
    return allowance(less_the_mean_logit, query, keys, **holds).errors()


@law("MK-14", of=CENTRED, case=heads)
def test_centred_logits_are_distances_from_the_mean_logit(impl, case):
    """delta_i = s_i - sbar."""
    states = one_query(impl, case)[:2]
    agrees(impl, CENTRED, *states, also=over_heads(centre), more=centred_late(impl, *states))


def of_their_sum(impl, query, keys):
    """What the sum of centred logits may be wrong by: each, centred early or late, and adding them."""
    allowed, late = impl.allowance(CENTRED, query, keys), centred_late(impl, query, keys)[0]
    return keys.shape[2] * (allowed.largest + late + 1e-15 * np.abs(allowed.expected).max())


@law("MK-15", of=CENTRED, case=heads)
def test_centred_logits_sum_to_zero(impl, case):
    """For every query."""
    query, keys, _ = one_query(impl, case)
    total = impl.momentkv_theory.centred_logits(query, keys).sum(axis=-1)
    slack = of_their_sum(impl, query, keys)
    near(total, np.zeros(query.shape[:2]), slack, "the sum of the centred logits")


@law("MK-16", of="momentkv_theory.centred_output", case=heads)
def test_centring_leaves_the_evicted_output_as_it_is(impl, case):
    """The softmax of the centred logits over the values is f_E."""
    full = oracle("momentkv_theory.full_output")
    agrees(impl, "momentkv_theory.centred_output", *one_query(impl, case), also=full)


def of_either_output(impl, together, alone):
    """What f_E among the sub-outputs, and f_E of the evicted tokens alone, may differ by."""
    among = impl.allowance("momentkv_theory.sub_outputs", *together, pick=1).largest
    by_itself = impl.allowance("momentkv_theory.centred_output", *alone).largest
    return among + by_itself + 1e-12 * max(1.0, np.abs(together[2]).max())


@law("MK-8", of=("momentkv_theory.centred_output", "momentkv_theory.sub_outputs"), case=heads, seed=seeds())
def test_the_evicted_output_needs_only_centred_logits(impl, case, seed):
    """The second of the sub-outputs of equation 2 is the centred softmax over the evicted tokens alone."""
    query, keys, values, kept = together = halves(impl, case, seed)
    evicted = impl.momentkv_theory.sub_outputs(*together)[1]
    for place in np.ndindex(keys.shape[:2]):
        alone = query[place], keys[place][~kept[place]], values[place][~kept[place]]
        got = agrees(impl, "momentkv_theory.centred_output", *alone)
        near(got, evicted[place], of_either_output(impl, together, alone), "the centred softmax, f_E,")


def terms_by_hand(query, keys, values) -> dict[str, Any]:
    """Numerator and denominator of equation 26 and their parts, token by token."""
    deltas = centre(query, keys)
    weighted = [
        (math.exp(delta), delta, math.expm1(delta) - delta, value)
        for delta, value in zip(deltas, values, strict=True)
    ]
    parts: dict[str, Any] = {
        "numerator": sum(weight * value for weight, *_, value in weighted),
        "mean_part": sum(value for *_, value in weighted),
        "linear_part": sum(delta * value for _, delta, _, value in weighted),
        "numerator_remainder": sum(rest * value for *_, rest, value in weighted),
        "denominator": sum(weight for weight, *_ in weighted),
        "denominator_remainder": sum(rest for *_, rest, _ in weighted),
        "spread": max(map(abs, deltas)),
        "largest_value": max(math.sqrt(sum(x * x for x in value)) for value in values),
    }
    return parts


FIELDS = (
    "spread",
    "largest_value",
    "denominator",
    "denominator_remainder",
    "numerator",
    "mean_part",
    "linear_part",
    "numerator_remainder",
)


@law("MK-26", of="momentkv_theory.expansion", case=heads, name=st.sampled_from(FIELDS))
def test_numerator_and_denominator_split_into_first_order_and_remainder(impl, case, name):
    """A = n vbar + sum delta v + R_num and B = n + R_den."""
    arguments = one_query(impl, case)
    expected = over_heads(lambda *head: terms_by_hand(*head)[name])
    agrees(
        impl, "momentkv_theory.expansion", *arguments, pick=1 + FIELDS.index(name), also=expected, what=name
    )


def expanded(impl, case):
    """The Expansion of a case, from the loops, and |fhat_E| = |mean part + linear part| / n."""
    found = [over_heads(lambda *head, name=name: terms_by_hand(*head)[name]) for name in FIELDS]
    parts = (impl.round(of(*one_query(impl, case))) for of in found)
    terms = Expansion(case.length, **dict(zip(FIELDS, parts, strict=True)))
    return terms, lengths(terms.mean_part + terms.linear_part) / case.length


def half_spread(terms):
    return terms.spread**2 * np.exp(terms.spread) / 2


@law("MK-17", of="momentkv_theory.remainder_bounds", case=heads)
def test_the_bound_of_the_denominator_is_the_printed_number(impl, case):
    """n sigma^2 e^sigma / 2."""
    terms, _ = expanded(impl, case)
    agrees(impl, "momentkv_theory.remainder_bounds", terms, pick=0, also=case.length * half_spread(terms))


@law("MK-18", of="momentkv_theory.remainder_bounds", case=heads)
def test_the_bound_of_the_numerator_is_the_printed_number(impl, case):
    """n sigma^2 V_max e^sigma / 2."""
    terms, _ = expanded(impl, case)
    expected = case.length * half_spread(terms) * terms.largest_value
    agrees(impl, "momentkv_theory.remainder_bounds", terms, pick=1, also=expected)


@law("MK-27", of="momentkv_theory.inverse_to_first_order", case=heads)
def test_the_inverse_to_first_order_is_the_printed_line(impl, case):
    """A / n - A R_den / n^2."""
    terms, n = expanded(impl, case)[0], case.length
    expected = terms.numerator / n - terms.numerator * terms.denominator_remainder[..., None] / n**2
    agrees(impl, "momentkv_theory.inverse_to_first_order", terms, also=expected)


@law(
    "MK-28",
    of=("momentkv_theory.approximation_error", "momentkv_theory.approximation_error_exactly"),
    case=heads,
)
def test_the_approximation_errors_are_their_lines(impl, case):
    """R_num / n - A R_den / n^2 as printed, and (R_num - R_den fhat_E) / B exactly."""
    terms, n = expanded(impl, case)[0], case.length
    remainder = terms.denominator_remainder[..., None]
    printed = terms.numerator_remainder / n - terms.numerator * remainder / n**2
    agrees(impl, "momentkv_theory.approximation_error", terms, also=printed)
    approximate = (terms.mean_part + terms.linear_part) / n
    exact = (terms.numerator_remainder - remainder * approximate) / terms.denominator[..., None]
    agrees(impl, "momentkv_theory.approximation_error_exactly", terms, also=exact)


@law("MK-29", of="momentkv_theory.error_bound", case=heads)
def test_the_lines_of_the_error_bound(impl, case):
    """As printed; in the second line |A| / n is at most |fhat_E| + |R_num| / n, which is mended by one
    division by n less.
    """
    terms, approximate = expanded(impl, case)
    n, half = case.length, half_spread(terms)
    second = half * (approximate + lengths(terms.numerator_remainder) / n)
    first = (
        lengths(terms.numerator_remainder) / n
        + lengths(terms.numerator) * np.abs(terms.denominator_remainder) / n**2
    )
    middle = half * terms.largest_value
    for pick, expected in enumerate(
        (first, middle + second / n, middle + second, half * (terms.largest_value + approximate))
    ):
        agrees(impl, "momentkv_theory.error_bound", terms, pick=pick, also=expected, what=f"line {pick + 1}")


@law("MK-30", of="momentkv_theory.geometric_bound", case=heads)
def test_the_geometric_bound_is_the_printed_number(impl, case):
    """|q|^2 / (2d) e^(|q| r_max / sqrt(d)) r_max^2 (V_max + |fhat_E|), r_max the largest distance of a key
    from their mean.
    """

    def by_hand(query, keys, values):
        terms, size, d = terms_by_hand(query, keys, values), math.hypot(*query), len(query)
        furthest = max(math.dist(key, keys.mean(axis=0)) for key in keys)
        approximate = math.hypot(*(terms["mean_part"] + terms["linear_part"])) / len(keys)
        bound = size**2 / (2 * d) * math.exp(size * furthest / math.sqrt(d)) * furthest**2
        return bound * (terms["largest_value"] + approximate)

    agrees(impl, "momentkv_theory.geometric_bound", *one_query(impl, case), also=over_heads(by_hand))


@law("MK-19", of="momentkv_theory.linear_part", case=heads)
def test_the_linear_part_is_a_product_with_the_covariance(impl, case):
    """Stilde q / sqrt(d) = sum delta_i v_i."""
    query, keys, values = one_query(impl, case)
    covariance = impl.round(np.swapaxes(values, -1, -2) @ (keys - keys.mean(axis=2, keepdims=True)))
    by_hand = over_heads(lambda query, rows: [math.fsum(row * query) / math.sqrt(len(query)) for row in rows])
    agrees(impl, "momentkv_theory.linear_part", query, covariance, also=by_hand)


@law("MK-31", of="momentkv_theory.log_partition", case=heads)
def test_the_partition_function_and_its_lower_bound(impl, case):
    """log Z_E, and log n + sbar, which is never above it."""
    path, states = "momentkv_theory.log_partition", one_query(impl, case)[:2]

    def log_z(query, keys):
        weights, top = weights_of(query, keys)
        return top + math.log(math.fsum(weights))

    def bound(query, keys):
        return math.log(len(keys)) + (keys @ query).mean() / math.sqrt(len(query))

    agrees(impl, path, *states, pick=0, also=over_heads(log_z), what="log Z_E")
    agrees(impl, path, *states, pick=1, also=over_heads(bound), what="log Zhat_E")
    whole, below = impl.call(path, *states)
    lies(impl, below, (-np.inf, whole), "the lower bound of log Z_E", times=2)


@law("MK-32", of="momentkv_theory.partition_ratio", case=heads)
def test_the_ratio_is_the_mean_of_the_exponentials(impl, case):
    """Z_E / Zhat_E = (1/n) sum exp(delta_i)."""
    by_hand = over_heads(lambda query, keys: np.mean([math.exp(delta) for delta in centre(query, keys)]))
    agrees(impl, "momentkv_theory.partition_ratio", *one_query(impl, case)[:2], also=by_hand)


@law("MK-34", of="momentkv_theory.logit_variance", case=heads)
def test_the_logit_variance_is_a_quadratic_form(impl, case):
    """q^T Sigma_k q / d = (1/n) sum delta_i^2, over n and not n - 1."""
    by_hand = over_heads(lambda query, keys: np.mean([delta**2 for delta in centre(query, keys)]))
    agrees(impl, "momentkv_theory.logit_variance", *one_query(impl, case)[:2], also=by_hand)


eighths = st.integers(1, 64).map(lambda count: np.array([count / 8]))


@law("MK-35", of="momentkv_theory.weight_bias", retained=eighths, estimate=eighths, excess=st.integers(0, 64))
def test_the_weight_bias_is_the_difference_of_the_weights(impl, retained, estimate, excess):
    """Two lines and the mended third are Z_R / (Z_R + Zhat_E) - Z_R / (Z_R + Z_E); the printed third is
    w_R / what_R of it.
    """
    evicted = estimate * (1 + excess / 8)
    expected = retained / (retained + estimate) - retained / (retained + evicted)
    printed, sides = expected * (retained + estimate) / (retained + evicted), (retained, evicted, estimate)
    for pick, line in enumerate((expected, expected, printed, expected)):
        agrees(impl, "momentkv_theory.weight_bias", *sides, pick=pick, also=line, what=f"line {pick + 1}")


@law(
    "MK-36",
    of="momentkv_theory.estimated_evicted_weight",
    retained=eighths,
    estimate=eighths,
    excess=st.integers(0, 64),
)
def test_the_estimated_weight_follows_from_the_true_one(impl, retained, estimate, excess):
    """what_E = w_E rho / (w_R + w_E rho) = Zhat_E / (Z_R + Zhat_E)."""
    evicted = estimate * (1 + excess / 8)
    share, ratio = impl.round(evicted / (retained + evicted)), impl.round(estimate / evicted)
    expected = share * ratio / (1 - share + share * ratio)
    agrees(impl, "momentkv_theory.estimated_evicted_weight", share, ratio, also=expected)
    # mass and ratio were rounded to the dtype
    rounds_to(impl, expected, estimate / (retained + estimate), "the weight of the estimate", roundings=2)


@law(
    "MK-36",
    of="momentkv_theory.output_error",
    sides=st.tuples(vectors, vectors, vectors),
    share=fractions,
    estimated=fractions,
)
def test_the_output_error_has_two_sources(impl, sides, share, estimated):
    """f - fhat = w_E (f_E - fhat_E) + (w_E - what_E)(fhat_E - f_R)."""
    retained, evicted, approximate = sides
    sources = share * (evicted - approximate), (share - estimated) * (approximate - retained)
    parts = [
        agrees(impl, "momentkv_theory.output_error", *sides, share, estimated, pick=pick, also=expected)
        for pick, expected in enumerate(sources)
    ]
    exact = (1 - share) * retained + share * evicted - (1 - estimated) * retained - estimated * approximate
    rounds_to(impl, sum(parts), exact, "the sum of the two parts, f - fhat,", roundings=8)


@law(
    "MK-36S",
    of="momentkv_theory.largest_harmless_error",
    sides=st.tuples(vectors, vectors, vectors),
    share=fractions,
    part=fractions,
)
def test_an_estimate_within_the_largest_harmless_error_never_hurts(impl, sides, share, part):
    """|f_E - f_R|: no estimate at this distance from f_E,
    on any side, leaves a larger error than f_R does.
    """
    retained, evicted, towards = sides
    distance = lengths(evicted - retained)
    agrees(impl, "momentkv_theory.largest_harmless_error", retained, evicted, also=distance)
    reach = impl.call("momentkv_theory.largest_harmless_error", retained, evicted) / np.maximum(
        lengths(towards), 1e-9
    )
    full, estimated = (1 - share) * retained + share * evicted, share * part
    for approximate in (evicted + reach[..., None] * towards, evicted - reach[..., None] * towards):
        error = lengths(full - (1 - estimated) * retained - estimated * approximate)
        lies(impl, error, (0, share * distance), "the error of the correction", roundings=0)
