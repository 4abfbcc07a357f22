"""Laws of a cache in pages and of its compaction: PAGE-1 to PAGE-10."""

from dataclasses import replace

from evictionary.reference.cache import PagedCache
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.paging.helpers import (
    counts_of,
    drawn,
    held,
    in_pages,
    of_places,
    pages_of,
    slots_of,
)
from evictionary.spec_tests.shared.helpers import attention_by_hand

COMPACT, ATTEND, GATHER, SLOTS = (
    "paging.compact_pages",
    "paging.attend_pages",
    "paging.gather_pages",
    "paging.slot_mapping",
)
# Up to four sequences: offsets that are right for the first and the second may be wrong for the third.
CASES = seeded_cases(max_length=33).map(lambda case: replace(case, batch=case.batch + case.seed % 3))


def check_moved(impl, paged, kept, name):
    """Raise Violation unless the first places of each head hold
    what the kept places of this pool held, in their order.
    """
    after, _ = impl.paging.compact_pages(paged, kept)
    pool = getattr(impl.rounded(paged), name)
    wanted = [
        rows[mask]
        for rows, mask in zip(held(paged, pool, paged.lengths), of_places(paged, kept), strict=True)
    ]
    got = held(paged, getattr(after, name), counts_of(paged, kept))
    equal(
        np.concatenate(list(got)),
        np.concatenate(wanted),
        f"the first places do not hold the {name} of the kept tokens in order",
    )


def check_freed(impl, paged, kept):
    """Raise Violation unless each page is freed that held a token and holds none now, and no other."""
    _, freed = impl.paging.compact_pages(paged, kept)
    wanted = np.zeros(len(paged.keys), dtype=bool)
    for item in range(len(kept)):
        before, now = (pages_of(paged, item, lengths) for lengths in (paged.lengths, counts_of(paged, kept)))
        wanted[before[len(now) :]] = True
    equal(freed, wanted, "other pages are freed than those behind the last one that is needed")


@law("PAGE-1", of=SLOTS, case=CASES, seed=seeds(), count=st.integers(1, 3))
def test_new_tokens_go_behind_the_last_one_of_each_head(impl, case, seed, count):
    """The next slots of a head follow its last token, page by page; the logical length, which is longer,
    does not count.
    """
    paged = in_pages(case, seed)
    count = min(count, paged.block_table.shape[1] * paged.keys.shape[1] - paged.lengths.max())
    got = impl.paging.slot_mapping(paged, int(count))
    expected = np.zeros((*paged.lengths.shape, count))
    for item, head in np.ndindex(paged.lengths.shape):
        following = slots_of(paged, item)[paged.lengths[item, head] :][:count]
        expected[item, head] = [page * paged.keys.shape[1] + offset for page, offset in following]
    equal(got, expected, "the next slots are not those behind the tokens that the head holds")


@law("PAGE-2", of=GATHER, case=CASES, seed=seeds())
def test_pages_hold_the_tokens_in_the_order_of_their_places(impl, case, seed):
    """Head by head the tokens come as they were put into the pages; NaN in every other slot shows what
    else is read.
    """
    paged = in_pages(case, seed)
    cache = impl.paging.gather_pages(paged)
    equal(cache.lengths, paged.lengths, "the lengths are not those of the heads")
    for name in ("keys", "values", "positions"):
        wanted = np.concatenate(list(held(paged, getattr(impl.rounded(paged), name), paged.lengths)))
        equal(getattr(cache, name), wanted, f"the {name} are not those of the pages, in order")


def check_attend(impl, case, queries, paged, visible, pick):
    """Raise Violation unless attention over the pages is
    that of plain loops over the visible tokens of the case.
    """
    keys, values = impl.rounded((case.keys, case.values))
    by_hand = attention_by_hand(queries, keys, values, visible)[pick]
    size = (1 + np.abs(queries).max() * np.abs(keys).max() * case.head_dim) * (1 + np.abs(values).max())
    agrees(
        impl,
        ATTEND,
        queries,
        paged,
        pick=pick,
        by_hand=by_hand,
        size=size,
        what=("the output", "the log-sum-exp")[pick],
    )


@law("PAGE-3", of=ATTEND, case=CASES, seed=seeds(), pick=st.integers(0, 1))
def test_attention_over_pages_is_that_over_their_tokens(impl, case, seed, pick):
    """Output and log-sum-exp are those of the tokens that each
    head holds; what every other slot holds does not matter.
    """
    paged = in_pages(case, seed, least=1)
    check_attend(
        impl, case, impl.round(case.queries), paged, np.arange(case.length) < paged.lengths[..., None], pick
    )


@law("PAGE-3", of=(COMPACT, ATTEND), case=CASES, seed=seeds())
def test_attention_after_compaction_is_that_over_the_kept_tokens(impl, case, seed):
    """Compacted pages are attended to as the tokens of the
    mask: what is left of the evicted ones has no weight.
    """
    paged, kept = drawn(case, seed, least=1)
    visible = np.zeros(case.keys.shape[:3], dtype=bool)
    for place, mask in zip(np.ndindex(paged.lengths.shape), of_places(paged, kept), strict=True):
        visible[place][: len(mask)] = mask
    check_attend(impl, case, impl.round(case.queries), impl.paging.compact_pages(paged, kept)[0], visible, 0)


@law("PAGE-4", of=COMPACT, case=CASES, seed=seeds())
def test_kept_tokens_move_to_the_front_in_their_order(impl, case, seed):
    """The first places of each head hold the keys of its kept tokens, in their order, bit for bit."""
    check_moved(impl, *drawn(case, seed), "keys")


@law("PAGE-4", of=COMPACT, examples=2, case=long_cases(head_dims=(64,), lengths=(4097, 8191)), seed=seeds())
def test_thousands_of_tokens_move_in_their_order(impl, case, seed):
    """In a sequence of thousands of tokens, over hundreds of pages, each kept key arrives at its place."""
    check_moved(impl, *drawn(case, seed), "keys")


@law("PAGE-5", of=COMPACT, case=CASES, seed=seeds(), name=st.sampled_from(["values", "positions"]))
def test_values_and_positions_move_with_the_keys(impl, case, seed, name):
    """The places that hold the keys of the kept tokens
    hold their values, and their positions as they were.
    """
    check_moved(impl, *drawn(case, seed), name)


@law("PAGE-5", of=COMPACT, case=CASES, seed=seeds())
def test_the_logical_length_and_the_dtype_stay(impl, case, seed):
    """The next token of a sequence has the position that it would have had, and the pools have the dtype
    that they had.
    """
    paged, kept = drawn(case, seed)
    after, _ = impl.paging.compact_pages(paged, kept)
    equal(after.seen, paged.seen, "the logical length is not what it was")
    shapes = [[pool.shape for pool in each[:3]] for each in (after, paged)]
    require(shapes[0] == shapes[1], "the pools have other shapes", *shapes[::-1])
    require(
        impl.calls[-1].dtype == impl.dtype, "the pools have another dtype", impl.dtype, impl.calls[-1].dtype
    )


@law("PAGE-6", of=COMPACT, case=CASES, seed=seeds())
def test_each_head_has_the_length_that_it_keeps(impl, case, seed):
    """The physical length counts the kept tokens of the head;
    what the mask says beyond its length does not count.
    """
    paged, kept = drawn(case, seed)
    equal(
        impl.paging.compact_pages(paged, kept)[0].lengths,
        counts_of(paged, kept),
        "the lengths do not count the kept tokens",
    )


@law("PAGE-7", of=COMPACT, case=CASES, seed=seeds())
def test_the_freed_pages_are_those_of_the_tail(impl, case, seed):
    """Freed is each page that held a token and holds none of any head now: with every token kept, no page."""
    paged, kept = drawn(case, seed)
    check_freed(impl, paged, kept)
    check_freed(impl, paged, np.ones_like(kept))


@law("PAGE-7", of=COMPACT, case=CASES, seed=seeds())
def test_the_first_pages_of_the_block_table_stay(impl, case, seed):
    """The pages that still hold tokens are the first of the block table, in their order."""
    paged, kept = drawn(case, seed)
    after, _ = impl.paging.compact_pages(paged, kept)
    for item, pages in enumerate(after.block_table):
        stay = pages_of(paged, item, counts_of(paged, kept))
        equal(pages[: len(stay)], stay, "the first pages of the block table are not those that stay")


@law("PAGE-8", of=COMPACT, case=CASES, seed=seeds())
def test_pages_of_others_stay_bit_for_bit(impl, case, seed):
    """The first sequence evicts and the others keep all: no
    slot of another page changes, one without a token neither.
    """
    paged, kept = drawn(case, seed)
    kept[1:] = True
    after, _ = impl.paging.compact_pages(paged, kept)
    others = ~np.isin(np.arange(len(paged.keys)), pages_of(paged, 0, paged.lengths))
    for name in ("keys", "values", "positions"):
        got, wanted = (
            np.nan_to_num(getattr(each, name)[others], nan=77) for each in (after, impl.rounded(paged))
        )
        equal(got, wanted, f"the {name} of pages that the first sequence does not hold have changed")


def check_alone(impl, case, seed, axis):
    """Raise Violation unless each sequence (axis 0) or head (axis 1) has alone the tokens and the length
    that it has here.
    """
    paged, kept = drawn(case, seed)
    after, _ = impl.paging.compact_pages(paged, kept)
    for index in range(kept.shape[axis]):
        items, heads = own = tuple(
            slice(index, index + 1) if each == axis else slice(None) for each in (0, 1)
        )
        keys, values, positions = (pool[:, :, heads] for pool in paged[:3])
        part = PagedCache(
            keys, values, positions, paged.block_table[items], paged.lengths[own], paged.seen[items]
        )
        alone, _ = impl.paging.compact_pages(part, kept[own])
        equal(alone.lengths, after.lengths[own], "it has another length alone")
        lengths = np.minimum(alone.lengths, part.lengths)
        got, wanted = (list(held(part, pool, lengths)) for pool in (alone.keys, after.keys[:, :, heads]))
        equal(np.concatenate(got), np.concatenate(wanted), "it has other tokens alone")


@law("PAGE-8", of=COMPACT, case=CASES, seed=seeds())
def test_a_sequence_gives_alone_what_it_gives_among_others(impl, case, seed):
    """Each sequence compacted alone has the tokens and the length that it has in the batch."""
    check_alone(impl, case, seed, 0)


@law("PAGE-6", of=COMPACT, case=CASES, seed=seeds())
def test_a_layer_gives_alone_what_it_gives_beside_others(impl, case, seed):
    """Layers that share a block table are more heads: each has alone the tokens and the length that it has
    beside the others.
    """
    check_alone(impl, case, seed, 1)


@law("PAGE-7", of=COMPACT, case=CASES, seed=seeds())
def test_sequences_without_tokens_have_no_page_to_free(impl, case, seed):
    """Where no head holds a token, nothing is freed and nothing moves."""
    paged, kept = drawn(case, seed)
    check_freed(impl, paged._replace(lengths=np.zeros_like(paged.lengths)), kept)


@law("PAGE-9", of=COMPACT, case=CASES, seed=seeds())
def test_twice_is_once(impl, case, seed):
    """Compacted again with every token kept, a cache has the same tokens and frees no page."""
    paged, kept = drawn(case, seed)
    once, every = (
        impl.paging.compact_pages(paged, kept)[0]._replace(lengths=counts_of(paged, kept)),
        np.ones_like(kept),
    )
    check_freed(impl, once, every)
    check_moved(impl, once, every, "keys")


@law("PAGE-9", of=COMPACT, case=CASES, seed=seeds())
def test_a_call_leaves_nothing_behind(impl, case, seed):
    """After a call with the opposite mask tokens and pages are those of the own mask: no workspace or free
    list is carried over.
    """
    paged, kept = drawn(case, seed)
    impl.paging.compact_pages(paged, ~kept)
    check_moved(impl, paged, kept, "keys")
    impl.paging.compact_pages(paged, ~kept)
    check_freed(impl, paged, kept)


def ones(pages, table, lengths):
    """Pools of pages of two slots, all ones, with this block table."""
    pools = np.ones((pages, 2, 1, 2)), np.ones((pages, 2, 1, 2)), np.zeros((pages, 2, 1), dtype=np.int64)
    return PagedCache(*pools, np.array(table), np.array(lengths), np.array([9] * len(table)))


@law("PAGE-10", of=COMPACT, kind="refusal", wrong=st.sampled_from([([0, 1], 3), ([0, 4], 3), ([0, 3], 5)]))
def test_pages_that_are_not_the_sequence_s_own_are_refused(impl, wrong):
    """A page that another sequence holds, one that the pool does not have, or more tokens than the table
    has places for.
    """
    pages, length = wrong
    if impl.reads_numbers:
        refused(
            impl, "paged", COMPACT, ones(4, [[2, 1], pages], [[4], [length]]), np.ones((2, 1, 4), dtype=bool)
        )


@law("PAGE-1", of=SLOTS, kind="refusal")
def test_tokens_without_a_page_are_refused(impl):
    """A block table of two places has no slot for a third token."""
    if impl.reads_numbers:
        refused(impl, "count|paged", SLOTS, ones(1, [[0]], [[0]]), 3)
