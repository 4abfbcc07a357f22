"""Laws of the correction that is never worse: MB-1 to MB-7."""

from evictionary.reference import momentkv, momentkv_bounded
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.momentkv.helpers import moments_of, short_cases, some, whole
from evictionary.spec_tests.shared.helpers import attention_by_hand

RANGE, MASS, BOX, ESTIMATE = (
    f"momentkv_bounded.{name}"
    for name in ("logit_range", "log_partition_bounds", "evicted_bounds", "bounded_evicted")
)
UPDATE, ATTEND, CERTIFIED = (f"momentkv_bounded.{name}" for name in ("update", "attend", "attend_certified"))
shifts = st.sampled_from([0.0, 2.0])
scales = st.sampled_from([0.125, 1.0])


def bounds_of(keys, values, evicted=True):
    evicted = np.broadcast_to(evicted, keys.shape[:-1])
    return momentkv_bounded.update(momentkv_bounded.no_bounds(keys, values), keys, values, evicted)


def held(*evicted):
    """The moments and the bounds of evicted tokens."""
    return moments_of(*evicted), bounds_of(*evicted)


def evicted_set(case, shift, scale):
    """One query of each head, and its evicted tokens: whole numbers, the values moved, the query scaled;
    exact in every dtype.
    """
    query, keys, values, _ = whole(case, 0)
    values, query = values + shift, query[:, :: case.group] * scale
    return query, keys, values, *held(keys, values)


def attention(query, keys, values, seen=True):
    """In plain loops the output and the logarithm of the partition function over the seen tokens."""
    seen = np.broadcast_to(seen, keys.shape[:3])
    return [found[:, :, 0] for found in attention_by_hand(query[:, :, None], keys, values, seen)]


def decoding(case, seed, shift, scale):
    """The arguments of attend, and the outputs of full
    attention, of the retained tokens alone and of MomentKV.
    """
    query, keys, values, kept = whole(case, seed + 1)
    query = query * scale
    kept[..., 0] = True
    # The evicted tokens are moved: a correction has something to do, and may miss.
    gone_keys, gone_values = (
        np.clip(np.round(states), -2, 2) for states in (case.next_keys, case.next_values)
    )
    gone = gone_keys, gone_values + shift, some(case, seed, gone_keys.shape[:3])
    arguments = query, keys, values, kept, *held(*gone)
    every = (np.concatenate(pair, axis=2) for pair in zip((keys, values, kept), gone, strict=True))
    full, retained = attention(query, *every)[0], attention(query, keys, values, kept)[0]
    return arguments, full, retained, momentkv.attend(*arguments[:5])


def no_farther(impl, path, *arguments, other, truth, values, what):
    """Raise Violation unless the answer is the oracle's,
    and no farther from the truth than the other one is.
    """
    got = agrees(impl, path, *arguments)
    worse = lengths(got - truth) - lengths(other - truth)
    # Each channel may be wrong, and so may those of the other one.
    wrong = (float(worse.max()) - 1e-9) / (2 * values.shape[-1] ** 0.5)
    args, _ = impl.calls[-1].given
    require(impl.allowance(path, *args).covers(wrong - 1e-12, 0), f"{what}, by {worse.max():.3g}", other, got)


def encloses(impl, path, *arguments, least, most, what):
    """Raise Violation unless both bounds are the oracle's
    and hold what loops find, from the least to the most.
    """
    low, high = agrees(impl, path, *arguments)
    if (low <= least + 1e-9).all() and (high >= most - 1e-9).all():  # the allowance is dear
        return
    error = [1e-9 + within(impl, pick, roundings=0) for pick in (0, 1)]
    require((low <= least + error[0]).all(), f"{what} is below its bound", least, low)
    require((high >= most - error[1]).all(), f"{what} is above its bound", most, high)


@law("MB-1", of=UPDATE, case=cases(), seed=seeds())
def test_the_bounds_are_the_extremes_of_the_evicted_tokens(impl, case, seed):
    """The least and the largest of each channel, what was there before included, token by token; infinite
    where nothing was.
    """
    evicted, before = some(case, seed), some(case, seed + 1, case.next_keys.shape[:3])
    next_keys, next_values = (impl.round(states) for states in (case.next_keys, case.next_values))
    got = impl.momentkv_bounded.update(
        bounds_of(next_keys, next_values, before), case.keys, case.values, evicted
    )
    for place in np.ndindex(evicted.shape[:2]):
        for states, following, fields in (
            (case.keys, next_keys, got[:2]),
            (case.values, next_values, got[2:]),
        ):
            rows = [
                *impl.round(states)[place][evicted[place]].tolist(),
                *following[place][before[place]].tolist(),
            ]
            for pick, worst, field in zip((min, max), (np.inf, -np.inf), fields, strict=True):
                expected = [pick(column) for column in zip(*rows, strict=True)] or [worst] * states.shape[-1]
                equal(field[place], np.array(expected), "a bound is not the extreme of the evicted tokens")


@law("MB-2", of=RANGE, case=short_cases, scale=scales)
def test_every_logit_is_in_the_range(impl, case, scale):
    """No logit leaves [m, M], and two tokens at opposite corners reach both ends."""
    query, keys, _, _, bounds = evicted_set(case, 0, scale)
    logits = (keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5
    encloses(impl, RANGE, query, bounds, least=logits.min(axis=-1), most=logits.max(axis=-1), what="a logit")
    ends = (
        np.where(query >= 0, bounds.key_low, bounds.key_high),
        np.where(query >= 0, bounds.key_high, bounds.key_low),
    )
    for expected, corner in zip(oracle(RANGE)(query, bounds), ends, strict=True):
        loops(expected, (query * corner).sum(axis=-1) / query.shape[-1] ** 0.5, 10)


@law("MB-3", of=MASS, case=short_cases, scale=scales)
def test_the_mass_is_between_its_bounds(impl, case, scale):
    """Jensen's bound below and the chord above hold log Z_E, which loops sum."""
    query, keys, values, *bounds = evicted_set(case, 0, scale)
    truth = attention(query, keys, values)[1]
    encloses(impl, MASS, query, *bounds, least=truth, most=truth, what="log Z_E")


@law("MB-3", of=MASS)
def test_no_token_has_no_mass(impl):
    """Where nothing was evicted both bounds are -infinity: a mass of 0."""
    keys = np.zeros((1, 1, 2, 1))
    nothing = momentkv.no_moments(keys, keys), momentkv_bounded.no_bounds(keys, keys)
    for bound in impl.momentkv_bounded.log_partition_bounds(np.ones((1, 1, 1)), *nothing):
        equal(bound, np.full((1, 1), -np.inf), "a bound of the mass of no token")


@law("MB-3", of=MASS)
def test_two_ends_of_the_range_are_the_chord_itself(impl):
    """Keys 0, 0, 0, 2: the upper bound is log(3 + e^2) itself, the lower one log 4 + 1/2. No key: -inf.
    One key 2: both are 2.
    """
    keys = np.array([[[[0.0], [0], [0], [2]], [[0.0]] * 4, [[0.0], [0], [0], [2]]]])
    evicted = np.array([[[True] * 4, [False] * 4, [False] * 3 + [True]]])
    got = impl.momentkv_bounded.log_partition_bounds(np.ones((1, 3, 1)), *held(keys, keys, evicted))
    for bound, three_and_one in zip(got, (np.log(4) + 0.5, np.log(3 + np.exp(2))), strict=True):
        expected = np.array([[three_and_one, -np.inf, 2]])
        near(
            bound,
            expected,
            0.01 * np.abs(expected),
            "a bound of three keys 0 and one key 2, of none and of one",
        )


@law("MB-4", of=BOX, case=short_cases, shift=shifts, scale=scales)
def test_the_evicted_output_is_in_its_box(impl, case, shift, scale):
    """Attention over the evicted tokens alone, by loops, is in the box."""
    query, keys, values, *bounds = evicted_set(case, shift, scale)
    truth = attention(query, keys, values)[0]
    encloses(impl, BOX, query, *bounds, least=truth, most=truth, what="the evicted output")


@law("MB-4", of=BOX)
def test_two_tokens_reach_the_side_of_the_box(impl):
    """Keys -1 and 1, values 0 and 2, query 1: f_E is in 1 +
    [-1, 1] sinh(1), cut at 0 and 2; for 1/2 by sinh(1/2).
    """
    keys, values = np.array([[[[-1.0], [1]]] * 2]), np.array([[[[0.0], [2]]] * 2])
    low, high = impl.momentkv_bounded.evicted_bounds(np.array([[[1.0], [0.5]]]), *held(keys, values))
    side = np.array([[[0.0], [1 - np.sinh(0.5)]]])
    near(low, side, 0.02, "the lower side of the box of two tokens")
    near(high, 2 - side, 0.02, "the upper side of the box of two tokens")


@law("MB-4", of=BOX)
def test_the_box_of_no_token_is_zero(impl):
    """Where nothing was evicted both sides are 0, a number that a sum can take."""
    keys, values = np.zeros((1, 1, 2, 1)), np.array([[[[1.0], [3]]]])
    nothing = momentkv.no_moments(keys, values), momentkv_bounded.no_bounds(keys, values)
    for side in impl.momentkv_bounded.evicted_bounds(np.ones((1, 1, 1)), *nothing):
        equal(side, np.zeros((1, 1, 1)), "a side of the box of no token is not 0")


@law("MB-5", of=ESTIMATE, case=short_cases, shift=shifts, scale=scales)
def test_the_bounded_estimate_is_never_farther_from_the_evicted_output(impl, case, shift, scale):
    """It is in the box, it is MomentKV's where that is in the
    box, and it is never farther from f_E than MomentKV's.
    """
    query, keys, values, *bounds = evicted_set(case, shift, scale)
    paper, exact = momentkv.approximate_evicted(query, bounds[0]), oracle(ESTIMATE)(query, *bounds)
    low, high = momentkv_bounded.evicted_bounds(query, *bounds)
    inside = (low <= paper) & (paper <= high)
    loops(np.where(inside, exact, 0), np.where(inside, paper, 0), 10)
    truth = attention(query, keys, values)[0]
    what = "the bounded estimate is farther from f_E than MomentKV's"
    no_farther(impl, ESTIMATE, query, *bounds, other=paper, truth=truth, values=values, what=what)


@law("MB-5", of=ESTIMATE)
def test_no_estimate_lies_beyond_all_values(impl):
    """Evicted keys -1 and 1 with values 0 and 2, query 4: MomentKV estimates 5; the largest value is 2."""
    keys, values = np.array([[[[-1.0], [1]]]]), np.array([[[[0.0], [2]]]])
    got = impl.momentkv_bounded.bounded_evicted(np.full((1, 1, 1), 4.0), *held(keys, values))
    lies(impl, got, between=(0, 2), what="the estimate")


@law("MB-6", of=ATTEND, case=short_cases, seed=seeds(), shift=shifts, scale=scales)
def test_it_is_never_worse_than_momentkv(impl, case, seed, shift, scale):
    """Never farther from attention over all tokens than MomentKV's output is."""
    arguments, full, _, paper = decoding(case, seed, shift, scale)
    what = "the output is farther from full attention than MomentKV's"
    no_farther(impl, ATTEND, *arguments, other=paper, truth=full, values=arguments[2], what=what)


@law("MB-6", of=ATTEND)
def test_an_estimate_outside_the_values_is_moved_back(impl):
    """Evicted keys -1 and 1 with values 0 and 2, query 4: MomentKV estimates 1 + 4 = 5 with e^0 for a mass
    of cosh(4); f_R = 0.
    """
    keys, values, zero = np.array([[[[-1.0], [1]]]]), np.array([[[[0.0], [2]]]]), np.zeros((1, 1, 1, 1))
    query, kept = np.full((1, 1, 1), 4.0), np.ones((1, 1, 1), dtype=bool)
    got = impl.momentkv_bounded.attend(query, zero, zero, kept, *held(keys, values))
    # The weight is 2/3 at least, and 2 cosh(4) / (1 + 2 cosh(4)) at most: MomentKV says 10/3, the box ends at
    # nearly 2.
    heavy = 2 * np.cosh(4) / (1 + 2 * np.cosh(4))
    near(got, np.full((1, 1, 1), 2 * heavy), 0.02, "the output of an estimate beyond all values")


@law("MB-6", of=ATTEND)
def test_the_plain_case_is_momentkv(impl):
    """Equal keys: the mass and the evicted output are exact, one kept value 0 and three evicted ones of
    mean 4 give 3.
    """
    keys, values = np.zeros((1, 1, 4, 2)), np.array([[[[0.0], [2], [4], [6]]]])
    kept, query = np.array([[[True, False, False, False]]]), np.ones((1, 1, 2))
    got = impl.momentkv_bounded.attend(query, keys, values, kept, *held(keys, values, ~kept))
    near(got, np.full((1, 1, 1), 3.0), 0.02, "the mean of 0, 2, 4, 6")


@law("MB-7", of=CERTIFIED, case=short_cases, seed=seeds(), shift=shifts, scale=scales)
def test_it_is_never_worse_than_no_correction(impl, case, seed, shift, scale):
    """Never farther from attention over all tokens than the retained tokens alone are."""
    arguments, full, retained, _ = decoding(case, seed, shift, scale)
    what = "the output is farther from full attention than no correction"
    no_farther(impl, CERTIFIED, *arguments, other=retained, truth=full, values=arguments[2], what=what)


ends = st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0])
tokens = st.tuples(ends, ends, ends)  # a key of one channel, and a value of two
queries = st.sampled_from([0.5, 1.0, -2.0])


def safe_share(step, corners):
    """The largest share of a step, up to all of it, that leads no farther from any corner, by halving."""

    def is_safe(share):
        return all(
            math.dist([share * move for move in step], corner) <= math.hypot(*corner) + 1e-15
            for corner in corners
        )

    safe, unsafe = 0.0, 1.0
    if is_safe(unsafe):
        return unsafe
    for _ in range(60):
        middle = (safe + unsafe) / 2
        safe, unsafe = (middle, unsafe) if is_safe(middle) else (safe, middle)
    return safe


def outputs_by_hand(query, kept, gone):
    """MB-6 and MB-7 from the tokens themselves, with plain
    numbers: one retained token, so f_R is its value.
    """
    count, logits = len(gone), [query * key for key, *_ in gone]
    mean, least, largest = sum(logits) / count, min(logits), max(logits)
    share = (mean - least) / (largest - least) if largest > least else 0.0
    masses = count * math.exp(mean), count * ((1 - share) * math.exp(least) + share * math.exp(largest))
    weights = [mass / (mass + math.exp(query * kept[0])) for mass in masses]
    sides, step = [], []
    for retained, column in zip(kept[1:], list(zip(*gone, strict=True))[1:], strict=True):
        middle = sum(column) / count
        radius = math.sqrt((max(column) - middle) * (middle - min(column))) * math.sinh((largest - least) / 2)
        low, high = max(min(column), middle - radius) - retained, min(max(column), middle + radius) - retained
        sides.append((min(weight * low for weight in weights), max(weight * high for weight in weights)))
        slope = (
            sum((logit - mean) * (value - middle) for logit, value in zip(logits, column, strict=True))
            / count
        )
        step.append(min(max(weights[0] * (middle + slope - retained), sides[-1][0]), sides[-1][1]))
    safe = safe_share(step, list(itertools.product(*sides)))
    moved = [min(max(safe * move, low), high) for move, (low, high) in zip(step, sides, strict=True)]
    return [
        [retained + move for retained, move in zip(kept[1:], moves, strict=True)] for moves in (step, moved)
    ]


@law(
    "MB-7", of=(ATTEND, CERTIFIED), kept=tokens, gone=st.lists(tokens, min_size=1, max_size=3), query=queries
)
def test_no_corner_of_the_box_allows_more(impl, kept, gone, query):
    """The bounded output and the certified one of a few tokens by plain numbers: corner by corner, a
    larger share might hurt.
    """
    rows = np.array([kept, *gone])[None, None]
    keys, values, evicted = rows[..., :1], rows[..., 1:], np.arange(rows.shape[2])[None, None] > 0
    arguments = np.full((1, 1, 1), query), keys, values, ~evicted, *held(keys, values, evicted)
    for path, expected in zip((ATTEND, CERTIFIED), outputs_by_hand(query, kept, gone), strict=True):
        agrees(impl, path, *arguments)
        near(
            oracle(path)(*arguments),
            np.array([[expected]]),
            1e-6,
            "the oracle's output, from that of plain numbers,",
        )


@law("MB-7", of=CERTIFIED)
def test_the_share_is_the_largest_that_cannot_hurt(impl):
    """Equal keys, one kept value (0, 0), one evicted (2, 2): all of it, (1, 1). A kept value amid the
    evicted ones: none.
    """
    keys, values = np.zeros((1, 1, 3, 1)), np.array([[[[0.0, 0], [2, 2], [9, 9]]]])
    apart, around = np.array([[[[-4.0], [4], [0]]]]), np.array([[[[-1.0], [3], [0]]]])
    one, both = np.array([[[False, True, False]]]), np.array([[[True, True, False]]])
    for states, gone, kept, wanted in (
        ((keys, values), one, np.array([[[True, False, False]]]), 1.0),
        ((apart, around), both, ~both, 0.0),
    ):
        got = impl.momentkv_bounded.attend_certified(np.ones((1, 1, 1)), *states, kept, *held(*states, gone))
        near(
            got,
            np.full((1, 1, states[1].shape[-1]), wanted),
            0.02,
            f"a correction of which {wanted:g} is proved",
        )


@law("MB-7", of=(ATTEND, CERTIFIED))
def test_with_nothing_evicted_there_is_no_correction(impl):
    """No moments and infinite bounds: both outputs are that of the retained tokens."""
    keys, values = np.zeros((1, 1, 2, 1)), np.array([[[[1.0], [3]]]])
    nothing = momentkv.no_moments(keys, values), momentkv_bounded.no_bounds(keys, values)
    for function in (impl.momentkv_bounded.attend, impl.momentkv_bounded.attend_certified):
        got = function(np.ones((1, 2, 1)), keys, values, np.ones((1, 1, 2), dtype=bool), *nothing)
        equal(np.round(got, 2), 2.0, "the output with nothing evicted is not the mean of 1 and 3")


@law("MB-7", of=(ATTEND, CERTIFIED), kind="refusal")
def test_bad_arguments_are_refused(impl):
    """Infinite bounds of evicted tokens raise ValueError."""
    if not impl.reads_numbers:
        return
    keys, values, kept = np.ones((1, 2, 3, 2)), np.ones((1, 2, 3, 5)), np.ones((1, 2, 3), dtype=bool)
    moments, bounds = moments_of(keys, values), momentkv_bounded.no_bounds(keys, values)
    arguments = np.ones((1, 4, 2)), keys, values, kept, moments, bounds
    for function in (impl.momentkv_bounded.attend, impl.momentkv_bounded.attend_certified):
        with impl.refuses("bounds"):
            function(*arguments)


@law("MB-1", of=UPDATE, examples=2, case=long_cases(lengths=(65_537, 12_289), head_dims=(64, 80)))
def test_the_bounds_of_a_long_prompt_are_its_extremes(impl, case):
    """Of thousands of tokens all but every sixteenth evicted: the extremes of each channel."""
    keys, values = impl.round(case.keys), impl.round(case.values)
    gone = np.broadcast_to(np.arange(case.length) % 16 != 0, keys.shape[:3])
    got = impl.momentkv_bounded.update(momentkv_bounded.no_bounds(keys, values), keys, values, gone)
    for states, (low, high) in ((keys, got[:2]), (values, got[2:])):
        rows = states[:, :, gone[0, 0]]
        equal(low, rows.min(axis=2), "a bound of a long prompt is not the least of a channel")
        equal(high, rows.max(axis=2), "a bound of a long prompt is not the largest of a channel")


@law("MB-6", of=ATTEND, examples=2, case=long_cases(groups=(2, 1), lengths=(4097, 2049), head_dims=(64, 80)))
def test_a_long_prompt_agrees(impl, case):
    """Of thousands of tokens all but every sixteenth evicted: the output is that of the reference."""
    keys, values, query = (impl.round(states) for states in (case.keys, case.values, case.queries[:, :, 0]))
    kept = np.broadcast_to(np.arange(case.length) % 16 == 0, keys.shape[:3])
    moments = momentkv.Moments(*(impl.round(field) for field in moments_of(keys, values, ~kept)))
    arguments = query, keys, values, kept, moments, bounds_of(keys, values, ~kept)
    agrees(impl, ATTEND, *arguments, what="the output of a long prompt")
