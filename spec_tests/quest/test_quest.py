"""Laws of Quest: QU-1 to QU-4."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import refuses

SELECT, PAGES, APPEND, BOUNDS, ATTEND = (
    f"quest.{name}" for name in ("select", "page_bounds", "append", "bounds", "attend")
)
sizes = st.sampled_from([16, 1, 2, 3, 7, 40])


def box(keys, page_size):
    """The least and the largest number of each channel of
    each page, [2, B, H_kv, P, D]: the ends of what is sorted.
    """
    starts = range(0, keys.shape[2], page_size)
    pages = [np.sort(keys[:, :, start : start + page_size], axis=2) for start in starts]
    return np.array([np.stack([page[:, :, end] for page in pages], axis=2) for end in (0, -1)])


def bounds_by_hand(query, low, high):
    """Each query head beside its pages, [B, H_q, P]: the end of
    a channel by the sign of the query, summed without rounding.
    """
    low, high = (for_each_reader(each, query) for each in (low, high))
    return np.apply_along_axis(math.fsum, -1, query[:, :, None] * np.where(query[:, :, None] > 0, high, low))


@law("QU-1", of=PAGES, case=cases(), seed=seeds(), page_size=sizes)
def test_the_bounds_of_a_page_are_those_of_its_keys_in_any_order(impl, case, seed, page_size):
    """In each channel, and of the keys that are there: the last page may be shorter."""
    keys, draw = impl.round(case.keys), np.random.default_rng(seed)
    pages = np.split(np.arange(keys.shape[2]), range(page_size, keys.shape[2], page_size))
    permuted = keys[:, :, np.concatenate([draw.permutation(page) for page in pages])]
    got = np.array(impl.quest.page_bounds(permuted, page_size=page_size))
    equal(got, box(keys, page_size), "another bound of a page")


@law("QU-1", of=PAGES)
def test_a_page_has_sixteen_tokens_unless_told(impl):
    """Of the keys 0 to 32, the pages begin at 0, 16 and 32."""
    keys = np.arange(33.0)[:, None].repeat(width(impl), axis=1)[None, None]
    got = np.array(impl.quest.page_bounds(keys))
    equal(got, np.array([keys[:, :, [0, 16, 32]], keys[:, :, [15, 31, 32]]]), "other pages")


@law("QU-1", of=APPEND, case=cases(max_length=33), page_size=sizes)
def test_bounds_kept_token_by_token_are_those_of_all_keys_at_once(impl, case, page_size):
    """A token widens the last page, or begins a new one where that is full."""
    keys = impl.round(case.keys)
    kept = keys[:, :, :1], keys[:, :, :1]
    for place in range(1, keys.shape[2]):
        kept = impl.quest.append(*kept, keys[:, :, place], (place - 1) % page_size + 1, page_size=page_size)
    equal(np.array(kept), box(keys, page_size), "another bound than of all keys at once")


@law("QU-1", of=APPEND, kind="refusal", why="no signature says it, and no planted mistake changes it")
def test_a_last_page_of_too_many_tokens_is_refused(impl):
    """Seventeen tokens of a page that holds sixteen raise ValueError."""
    refuses(impl, APPEND, "count", 17)


@law("QU-2", of=BOUNDS, case=cases(), page_size=sizes)
def test_the_score_adds_the_larger_product_of_each_channel(impl, case, page_size):
    """Query head h reads the pages of KV head h // G; also sum by sum."""
    query, (low, high) = impl.round(case.queries[:, :, 0]), box(impl.round(case.keys), page_size)
    largest = max(1, np.abs(query).max()) * np.abs([low, high]).max() * case.keys.shape[-1]
    agrees(impl, BOUNDS, query, low, high, by_hand=bounds_by_hand, size=largest)


@law("QU-2", of=BOUNDS, case=cases(), page_size=sizes)
def test_no_key_of_a_page_scores_more_than_its_bound(impl, case, page_size):
    """The score is at least the largest q . k of the page, and equals it where the page has one key."""
    query, keys = impl.round(case.queries[:, :, 0]), impl.round(case.keys)
    got = impl.quest.bounds(query, *box(keys, page_size))
    products = (for_each_reader(keys, query) @ query[..., None])[..., 0]
    best = np.maximum.reduceat(products, range(0, keys.shape[2], page_size), axis=2)
    lies(impl, got, (best, best if page_size == 1 else np.inf), "the bound")


@law("QU-3", of=SELECT, case=cases(), pages=st.integers(1, 5), more=st.integers(0, 39), page_size=sizes)
def test_a_head_attends_to_the_pages_with_the_highest_bounds(impl, case, pages, more, page_size):
    """To whole pages, as many as the budget holds, and the last is one of them: no other page has a higher
    score than a chosen one.
    """
    query, keys = impl.round(case.queries[:, :, 0]), impl.round(case.keys)
    low, high = box(keys, page_size)
    scores, count = bounds_by_hand(query, low, high), min(pages, low.shape[2])
    budget = count * page_size + min(more % page_size, max(0, keys.shape[2] - 1 - count * page_size))
    got = impl.quest.select(query, keys, 2, budget=budget, page_size=page_size)
    require_mask(got, (*query.shape[:2], keys.shape[2]), "what is attended to")
    pages_of = got[..., ::page_size].repeat(page_size, axis=-1)
    equal(got, pages_of[..., : keys.shape[2]], "a page is attended to in part")
    last = np.broadcast_to(np.arange(low.shape[2]) == low.shape[2] - 1, scores.shape)
    slack = impl.allowance(BOUNDS, query, low, high)
    selects(got[..., ::page_size], scores, count, slack=slack, protected=last)


@law("QU-3", of=SELECT)
def test_two_queries_of_a_group_attend_to_their_own_pages(impl):
    """Pages of the keys (8, -8), (-8, 8), (1, 1), (0, 0) in two channels. The query (1, 0) attends to the
    first and the last page, and (0, 1) to the second and the last.
    """
    keys, query = np.zeros((1, 1, 7, width(impl))), np.zeros((1, 2, width(impl)))
    keys[0, 0, :6, 0], keys[0, 0, :6, -1] = [8, 8, -8, -8, 1, 1], [-8, -8, 8, 8, 1, 1]
    query[0, 0, 0], query[0, 1, -1] = 1, 1
    got = impl.quest.select(query, keys, 2, budget=5, page_size=2)
    equal(got, np.array([[[1, 1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0, 1]]]) > 0, "other pages")


@law("QU-3", of=SELECT, examples=2, case=paper_cases(groups=(1, 3)))
def test_a_long_text_has_the_same_choice(impl, case):
    """Of up to 131,072 tokens of whole numbers, an eighth of the pages."""
    query, keys = np.round(4 * case.queries[:, :, 0]), np.round(4 * case.keys)
    got = impl.quest.select(query, keys, 2, budget=keys.shape[2] // 8)
    scores = bounds_by_hand(query, *box(keys, 16))
    require_mask(got, (*query.shape[:2], keys.shape[2]), "what is attended to")
    last = np.broadcast_to(np.arange(scores.shape[2]) == scores.shape[2] - 1, scores.shape)
    selects(got[..., ::16], scores, keys.shape[2] // 128, protected=last)


@law("QU-3", of=SELECT, layer=st.integers(0, 3), settings=st.sampled_from([{}, {"skipped_layers": 1}]))
def test_the_first_layers_attend_to_all(impl, layer, settings):
    """The first two, unless told."""
    shape = (1, 2, 20, width(impl))
    got = impl.quest.select(np.ones((1, 2, shape[-1])), np.ones(shape), layer, budget=16, **settings)
    expected = np.arange(20) >= (0 if layer < settings.get("skipped_layers", 2) else 16)
    equal(got, np.broadcast_to(expected, got.shape), "another choice in this layer")


@law("QU-3", of=SELECT, kind="edge", case=cases(), page_size=sizes)
def test_a_budget_of_all_tokens_attends_to_all_and_one_below_a_page_to_the_last(impl, case, page_size):
    """Also where T tokens fill no whole number of pages."""
    query, length = case.queries[:, :, 0], case.keys.shape[2]
    got = impl.quest.select(query, case.keys, 2, budget=length, page_size=page_size)
    equal(got, np.ones((*query.shape[:2], length), dtype=bool), "a token is left out of a full budget")
    few = impl.quest.select(query, case.keys, 2, budget=1, page_size=page_size)
    last = np.arange(length) >= (length - 1) // page_size * page_size
    equal(few, np.broadcast_to(last, few.shape), "another page than the last")


@law("QU-3", of=SELECT, kind="edge", pages=st.integers(1, 6))
def test_of_equal_pages_the_earlier_are_chosen(impl, pages):
    """Beside the last, where all keys are equal."""
    keys = np.ones((1, 2, 21, width(impl)))
    got = impl.quest.select(keys[:, :, 0], keys, 2, budget=3 * pages, page_size=3)
    expected = (np.arange(21) // 3 < pages - 1) | (np.arange(21) >= 18)
    equal(got, np.broadcast_to(expected, got.shape), "a later page of equal score")


@law("QU-4", of=ATTEND, case=cases(), seed=seeds(), share=shares())
def test_the_output_is_the_attention_over_the_chosen_tokens_alone(impl, case, seed, share):
    """Of each query head over its own tokens, which are taken
    out of the cache. With all tokens it is the full attention.
    """
    query, keys, values = impl.round(case.queries[:, :, 0]), impl.round(case.keys), impl.round(case.values)
    attended = np.random.default_rng(seed).random((*query.shape[:2], keys.shape[2])) < share
    attended[..., -1] = True
    output, (own_keys, own_values) = [], (for_each_reader(each, query) for each in (keys, values))
    for head in np.ndindex(query.shape[:2]):
        chosen = own_keys[head][attended[head]], own_values[head][attended[head]]
        output.append(causal_weights(query[head][None], chosen[0]) @ chosen[1])
    by_hand = np.reshape(output, (*query.shape[:2], -1))
    agrees(impl, ATTEND, query, keys, values, attended, by_hand=by_hand, size=1 + np.abs(values).max())
