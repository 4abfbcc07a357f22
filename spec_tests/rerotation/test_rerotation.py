"""Laws of re-rotation: RR-1 to RR-9."""

from evictionary.reference.rope import rotate
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import draw_mask, most_some_few

REROTATED, COMPACT = "rerotation.rerotated", "rerotation.compact"
AFTER, NEXT = "rerotation.positions_after", "rerotation.next_position"
QUERY, BEFORE = "rerotation.rotated_query", "rerotation.positions_before"

thetas = st.sampled_from([10000.0, 100.0, 500000.0])
IN_PAIRS = seeded_cases(head_dims=EVEN_DIMS, max_length=33, kinds=("normal", "ties", "drift", "sinks"))


def places(case, seed, most=4000):
    """A position for each token of each head, [B, H_kv, T]."""
    return np.random.default_rng(seed).integers(0, most, size=case.keys.shape[:3])


def by_hand(states, positions, theta):
    """Each pair (i, i + D/2) of states [.., D] as a complex number, turned by position * frequency."""
    half = states.shape[-1] // 2
    frequencies = np.array([theta ** (-index / half) for index in range(half)])
    first, second = states[..., :half], states[..., half:]
    pairs = (first + 1j * second) * np.exp(1j * np.asarray(positions)[..., None] * frequencies)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def radii_of(states):
    """The length of its pair, for each channel of states [.., D]."""
    return np.tile(np.hypot(*np.split(states, 2, axis=-1)), 2)


def one_turn(impl, keys, old, new, theta=10000.0):
    """What a channel of a moved key may be wrong by: some turn a key back and forth, so both angles count."""
    allowed = impl.allowance(REROTATED, keys, old, new, theta=theta).largest
    angles = angle_error(impl, np.max(old) + np.max(new)) + 2.0**-44
    return float(allowed + angles * np.abs(keys).max())


def one_turn_of_a_query(impl, query, kept, theta):
    """What a channel of the next query may be wrong by, at a position up to the number of tokens."""
    allowed = impl.allowance(QUERY, query, kept, theta=theta).largest
    return float(allowed + (angle_error(impl, kept.shape[-1]) + 2.0**-44) * np.abs(query).max())


def turned_back_and_forth(impl, keys, length):
    """What a channel of a key of a long text may be wrong by that is turned back and forth."""
    return 2 * (rounding(impl) + angle_error(impl, 2 * length)) * np.abs(keys).max()


def cached(impl, bare, positions, theta=10000.0):
    """Keys cached at these positions, as the dtype holds them, and the most that this rounds of a pair."""
    exact = rotate(bare, positions, theta)
    keys = impl.round(exact)
    return keys, 2 * float(np.abs(keys - exact).max())


def moved(impl, keys, old, new, theta=10000.0):
    """The answer; Violation unless it is numbers of the shape of the keys."""
    got = impl.rerotation.rerotated(keys, old, new, theta=theta)
    require_numbers(got, keys.shape, "the moved keys")
    return got


# RR-1


@law("RR-1", of=REROTATED, case=IN_PAIRS, seed=seeds(), theta=thetas)
def test_each_key_turns_by_the_way_from_its_old_to_its_new_position(impl, case, seed, theta):
    """Each token of each head has a way of its own, forwards or backwards, in thousands of positions."""
    keys, old, new = impl.round(case.keys), places(case, seed), places(case, seed + 1)
    expected = by_hand(keys, new - old, theta)
    slack = one_turn(impl, keys, old, new, theta)
    near(moved(impl, keys, old, new, theta), expected, slack, "the moved keys")


@law("RR-1", of=REROTATED, case=IN_PAIRS, seed=seeds(), theta=thetas)
def test_a_moved_key_is_the_key_that_was_never_rotated_at_its_new_place(impl, case, seed, theta):
    """Keys cached at one place and moved to another are the keys before RoPE turned there at once."""
    old, new = places(case, seed), places(case, seed + 1)
    keys, rounded = cached(impl, case.keys, old, theta)
    expected = rotate(case.keys, new, theta)
    slack = one_turn(impl, keys, old, new, theta) + rounded
    near(moved(impl, keys, old, new, theta), expected, slack, "the moved keys")


@law("RR-1", of=REROTATED)
def test_two_positions_back_by_hand(impl):
    """From 6 to 4: the first pair turns by -2 radians,
    the second of two by -0.02; from 3 to 4 by 1 and 0.01.
    """
    channels = width(impl, 4)
    for old, new in ((6, 4), (3, 4)):
        for channel, frequency in ((0, 1.0), (1, 1e4 ** (-2 / channels))):
            angle = (new - old) * frequency
            basis, wanted = np.zeros((1, 1, 1, channels)), np.zeros((1, 1, 1, channels))
            basis[..., channel] = 1
            wanted[..., channel], wanted[..., channel + channels // 2] = math.cos(angle), math.sin(angle)
            at_old, at_new = np.full((1, 1, 1), old), np.full((1, 1, 1), new)
            slack = one_turn(impl, basis, at_old, at_new)
            near(impl.rerotation.rerotated(basis, at_old, at_new), wanted, slack, "a moved basis vector")


@law("RR-1", of=REROTATED, examples=2, case=long_cases(kinds=("normal", "sinks"), lengths=(4097, 8191)))
def test_thousands_of_keys_move_across_131072_positions(impl, case):
    """Each of thousands of tokens moves from any position up to 131,072 to any other, by theta 500,000."""
    keys, old, new = of_dtype(impl, case.keys), places(case, 1, 2**17), places(case, 2, 2**17)
    old[..., 0], new[..., 0] = 2**17, 0
    radii = radii_of(keys)
    got = impl.rerotation.rerotated(keys, old, new, theta=500000.0)
    expected, angles = by_hand(keys, new - old, 500000.0), (old + new)[..., None]
    rounds_to(impl, got, expected, "the moved keys of a long text", size=radii, angle=angles)


# RR-2 to RR-5


@law("RR-2", of=REROTATED, case=IN_PAIRS, seed=seeds())
def test_a_key_that_stays_where_it_is_does_not_change(impl, case, seed):
    """From a position to the same one is no turn."""
    keys, old = impl.round(case.keys), places(case, seed)
    near(moved(impl, keys, old, old), keys, one_turn(impl, keys, old, old), "the keys that stay")


@law("RR-2", of=REROTATED, case=IN_PAIRS, seed=seeds(), back=st.booleans())
def test_two_moves_are_one(impl, case, seed, back):
    """From a to b and from b to c is from a to c; and back to a it is no move."""
    keys, first, second = impl.round(case.keys), places(case, seed), places(case, seed + 1)
    last = first if back else places(case, seed + 2)
    halfway = moved(impl, keys, first, second)
    stored = impl.round(halfway)
    slack = 2 * one_turn(impl, keys, first, second) + 2 * np.abs(stored - halfway).max()
    slack += one_turn(impl, stored, second, last) + one_turn(impl, keys, first, last)
    at_once = keys if back else moved(impl, keys, first, last)
    near(moved(impl, stored, second, last), at_once, slack, "two moves")


@law("RR-3", of=REROTATED, case=IN_PAIRS, seed=seeds())
def test_a_move_keeps_the_length_of_each_pair(impl, case, seed):
    """No pair of channels grows or shrinks, and none mixes with another."""
    keys, old, new = impl.round(case.keys), places(case, seed), places(case, seed + 1)
    before, after = radii_of(keys), radii_of(moved(impl, keys, old, new))
    near(after, before, 2 * one_turn(impl, keys, old, new), "the length of a pair")


@law("RR-4", of=REROTATED, case=IN_PAIRS, seed=seeds(), theta=thetas)
def test_a_product_depends_on_the_new_distance_alone(impl, case, seed, theta):
    """Wherever a key was cached, its product with a query at m is that of the distance from its new place."""
    old, new, query = places(case, seed), places(case, seed + 1, 1000), case.next_keys[:, :, :1]
    position = 1000 + seed % 1000
    keys, rounded = cached(impl, case.keys, old, theta)
    got = (rotate(query, np.array([position]), theta) * moved(impl, keys, old, new, theta)).sum(axis=-1)
    expected = (query * by_hand(case.keys, new - position, theta)).sum(axis=-1)
    each = one_turn(impl, keys, old, new, theta) + rounded
    near(got, expected, each * np.abs(query).sum(axis=-1) * math.sqrt(2), "the product of query and key")


@law("RR-5", of=REROTATED, case=IN_PAIRS, seed=seeds(), count=st.sampled_from([8, 2, 32]))
def test_many_moves_drift_by_no_more_than_their_roundings(impl, case, seed, count):
    """Keys that are stored after each of n moves are off by at most n times what one move may be."""
    keys, old = impl.round(case.keys), places(case, seed, 200)
    expected, stored, slack = keys, keys, 0.0
    for step in range(1, count + 1):
        new = places(case, seed + step, 200)
        got = moved(impl, stored, old, new)
        slack = slack + one_turn(impl, stored, old, new)
        stored = impl.round(got)
        slack += float(np.abs(stored - got).max())
        expected, old = by_hand(expected, new - old, 10000.0), new
    # an error of one channel is carried on, mixed over a pair of channels
    near(stored, expected, math.sqrt(2) * slack, f"keys that moved {count} times")


@law(
    "RR-5", of=REROTATED, examples=2, case=long_cases(kinds=("normal",), lengths=(4097,), head_dims=(128, 64))
)
def test_keys_that_move_at_every_compression_of_a_long_answer_drift_no_further(impl, case):
    """16 compressions, each after 128 tokens, move 4 sinks
    of 4,097 tokens on by 128, and all other keys by nothing.
    """
    keys = of_dtype(impl, case.keys)
    radii = radii_of(keys)
    at = np.broadcast_to(np.arange(case.length), keys.shape[:3])
    stored, steps = keys, 16
    for _ in range(steps):
        new = np.where(np.arange(case.length) < 4, at + 128, at)
        stored, at = impl.round(impl.rerotation.rerotated(stored, at, new)), new
    expected = np.where(
        np.arange(case.length)[:, None] < 4, by_hand(keys, at - np.arange(case.length), 1e4), keys
    )
    what = "the keys after 16 compressions"
    rounds_to(impl, stored, expected, what, roundings=2 * steps, size=radii, angle=2 * steps * at.max())


# RR-6, RR-7


def ranks(kept):
    """The new position of each kept token, token by token; 0 for the others."""
    found = np.zeros(kept.shape, dtype=int)
    for head in np.ndindex(kept.shape[:-1]):
        for rank, token in enumerate(np.flatnonzero(kept[head])):
            found[head][token] = rank
    return found


def of_kept(got, kept, what):
    """The numbers of the kept tokens, 0 for the others; Violation unless there is one for each token."""
    require_numbers(got, kept.shape, what)
    return np.where(kept, got, 0)


@law("RR-6", of=AFTER, seed=seeds(), length=st.sampled_from([1, 2, 5, 17, 33]))
def test_kept_tokens_are_counted_from_zero_in_each_head(impl, seed, length):
    """Each head counts its own kept tokens, in the order of the text, without a gap."""
    kept = draw_mask((2, 3, length), seed)
    got = of_kept(impl.rerotation.positions_after(kept), kept, "the positions")
    equal(got, ranks(kept), "other positions of the kept tokens")


@law("RR-6", of=AFTER)
def test_sinks_and_window_become_consecutive(impl):
    """Of ten tokens with four sinks and a window of four, 0 1 2 3 6 7 8 9 become 0 to 7."""
    kept = np.isin(np.arange(10), [0, 1, 2, 3, 6, 7, 8, 9])[None, None]
    got = impl.rerotation.positions_after(kept)
    require_numbers(got, kept.shape, "the positions")
    equal(got[kept], np.arange(8), "other positions of sinks and window")


@law("RR-6", of=AFTER, examples=2, case=long_rows(("normal",)))
def test_a_long_row_is_counted_without_a_gap(impl, case):
    """Of up to 131,072 tokens about half stay, and get the positions 0 to M - 1."""
    kept = case.keys[..., 0] > 0
    got = of_kept(impl.rerotation.positions_after(kept), kept, "the positions")
    equal(got, ranks(kept), "other positions of the kept tokens")


@law("RR-7", of=NEXT, seed=seeds(), length=st.sampled_from([1, 2, 5, 17, 33]))
def test_the_next_token_follows_the_tokens_that_its_head_holds(impl, seed, length):
    """Its position is M in a head that keeps M tokens, 0 where none stays."""
    kept = draw_mask((2, 3, length), seed)
    counts = [[np.count_nonzero(head) for head in item] for item in kept]
    equal(impl.rerotation.next_position(kept), np.array(counts), "another position of the next token")


@law("RR-7", of=QUERY, case=IN_PAIRS, seed=seeds(), theta=thetas)
def test_the_next_query_turns_to_the_position_of_its_head(impl, case, seed, theta):
    """Query head h turns to M of KV head h // G, whatever the other heads keep."""
    query, kept = impl.round(case.queries[:, :, 0]), draw_mask(case.keys.shape[:3], seed)
    counts = for_each_reader(kept.sum(axis=-1), query)
    got = impl.rerotation.rotated_query(query, kept, theta=theta)
    near(got, by_hand(query, counts, theta), one_turn_of_a_query(impl, query, kept, theta), "the next query")


@law("RR-7", of=QUERY, examples=2, case=long_cases(kinds=("normal",), groups=(4,)))
def test_the_query_after_a_long_text_turns_to_the_position_of_its_head(impl, case):
    """After thousands of tokens, of which heads keep most, some or few."""
    query, kept = impl.round(case.queries[:, :, 0]), most_some_few(case)
    counts = for_each_reader(kept.sum(axis=-1), query)
    radii = radii_of(query)
    got = impl.rerotation.rotated_query(query, kept)
    angles = counts[..., None]
    rounds_to(impl, got, by_hand(query, counts, 1e4), "the next query", size=radii, angle=angles)


# RR-8


def check_compacted(impl, cache, bare, values, kept, theta, slack):
    """Raise Violation unless a cache is that of a text of the kept tokens, with their true positions."""
    where = np.nonzero(kept)
    equal(cache.lengths, kept.sum(axis=-1), "the lengths are not those of the kept tokens")
    equal(cache.positions, where[2], "the positions are not those in the text")
    equal(cache.values, impl.round(values)[where], "the values changed")
    # the i-th token of a head is at i
    own = np.concatenate([np.arange(np.count_nonzero(head)) for head in kept.reshape(-1, kept.shape[-1])])
    near(cache.keys, by_hand(bare[where], own, theta), slack, "the keys of the cache")


@law("RR-8", of=COMPACT, case=IN_PAIRS, seed=seeds(), theta=thetas)
def test_the_cache_is_that_of_a_text_of_the_kept_tokens(impl, case, seed, theta):
    """Head by head: keys before RoPE turned at 0 to M - 1, the values bit for bit, the true positions."""
    at = np.broadcast_to(np.arange(case.length), case.keys.shape[:3])
    keys, rounded = cached(impl, case.keys, at, theta)
    kept = draw_mask(case.keys.shape[:3], seed)
    cache = impl.rerotation.compact(keys, case.values, kept, theta=theta)
    slack = one_turn(impl, keys, at, at, theta) + rounded
    check_compacted(impl, cache, case.keys, case.values, kept, theta, slack)


@law("RR-8", of=COMPACT, case=IN_PAIRS)
def test_keeping_all_moves_nothing(impl, case):
    """With every token kept the cache holds the keys as they were."""
    keys = impl.round(case.keys)
    cache = impl.rerotation.compact(keys, case.values, np.ones(keys.shape[:3], dtype=bool))
    at = np.arange(case.length)[None, None]
    slack = one_turn(impl, keys, *[np.broadcast_to(at, keys.shape[:3])] * 2)
    near(cache.keys, keys.reshape(-1, keys.shape[-1]), slack, "the keys of the cache")


@law("RR-8", of=COMPACT, examples=2, case=long_cases(kinds=("normal", "sinks")))
def test_a_long_text_is_compacted(impl, case):
    """Of thousands of tokens heads keep most, some or few, each at its own positions."""
    at = np.broadcast_to(np.arange(case.length), case.keys.shape[:3])
    keys, rounded = cached(impl, case.keys, at)
    kept = most_some_few(case)
    cache = impl.rerotation.compact(keys, case.values, kept)
    slack = turned_back_and_forth(impl, keys, case.length) + rounded
    check_compacted(impl, cache, case.keys, case.values, kept, 10000.0, slack)


# RR-9


@law("RR-9", of=BEFORE, seed=seeds(), length=st.sampled_from([1, 2, 5, 17, 33]), ahead=st.integers(0, 300))
def test_the_kept_tokens_end_right_before_the_next_one(impl, seed, length, ahead):
    """In a head that keeps M tokens the i-th of them is M - i before the next token, at its true position."""
    kept = draw_mask((2, 3, length), seed)
    got = of_kept(impl.rerotation.positions_before(kept, length + ahead), kept, "the positions")
    wanted = np.where(kept, length + ahead - kept.sum(axis=-1, keepdims=True) + ranks(kept), 0)
    equal(got, wanted, "other positions of the kept tokens")


@law("RR-9", of=BEFORE)
def test_six_of_ten_tokens_by_hand(impl):
    """Sinks 0 1 and a window 6 7 8 9 of ten tokens become 4 to 9, before the next token at 10."""
    kept = np.isin(np.arange(10), [0, 1, 6, 7, 8, 9])[None, None]
    got = impl.rerotation.positions_before(kept, 10)
    require_numbers(got, kept.shape, "the positions")
    equal(got[kept], np.arange(4, 10), "other positions of sinks and window")


@law("RR-9", of=BEFORE)
def test_the_text_ends_with_the_last_token_unless_told(impl):
    """The kept ones of five tokens become 2, 3 and 4, before the next token at 5."""
    kept = np.array([[[False, True, True, False, True]]])
    got = impl.rerotation.positions_before(kept)
    require_numbers(got, kept.shape, "the positions")
    equal(got[kept], np.arange(2, 5), "other positions without a length")


@law("RR-9", of=BEFORE, kind="refusal", length=st.integers(2, 9))
def test_a_text_shorter_than_its_mask_is_refused(impl, length):
    """A text of fewer tokens than the mask has places raises ValueError."""
    refused(impl, "length", BEFORE, np.ones((1, 1, length), dtype=bool), length - 1)


@law("RR-9", of=BEFORE, examples=2, case=long_rows(("normal",)))
def test_a_long_row_ends_right_before_the_next_token(impl, case):
    """Of up to 131,072 tokens about half lie right before the next one, which follows 1,000 others."""
    kept = case.keys[..., 0] > 0
    length = kept.shape[-1] + 1000
    got = of_kept(impl.rerotation.positions_before(kept, length), kept, "the positions")
    wanted = np.where(kept, length - kept.sum(axis=-1, keepdims=True) + ranks(kept), 0)
    equal(got, wanted, "other positions of the kept tokens")
