"""Laws of StreamingLLM: SL-1."""

from evictionary.spec_tests.judge.prelude import *


@law(
    "SL-1",
    of=("streaming_llm.score", "selection.top_k"),
    case=cases(),
    sink_size=st.one_of(st.integers(0, 6), st.integers(7, 70)),
    share=shares(),
)
def test_sinks_and_the_most_recent_are_kept(impl, case, sink_size, share):
    """Top-k of the scores keeps the first tokens, as far as the budget goes, and fills up from the end."""
    length = case.keys.shape[2]
    budget = max(1, int(share * length))
    scores = impl.streaming_llm.score(case.keys, sink_size=sink_size)
    require_numbers(scores, case.keys.shape[:3], "the score")
    kept = impl.selection.top_k(scores, budget)
    first = min(sink_size, budget, length)
    positions = np.arange(length)
    expected = (positions < first) | (positions >= length - (budget - first))
    equal(
        kept,
        np.broadcast_to(expected, kept.shape),
        "other tokens than the sinks and the most recent are kept",
    )


@law("SL-1", of="streaming_llm.score", case=cases())
def test_only_positions_count(impl, case):
    """Other keys at the same positions score the same."""
    first, second = impl.streaming_llm.score(case.keys), impl.streaming_llm.score(-2 * case.keys)
    equal(second, first, "the score depends on the keys")


@law(
    "SL-1",
    of="streaming_llm.score",
    examples=3,
    case=paper_cases((131_072, 65_537, 16_384)),
    sink_size=st.sampled_from([4, 256, 64, 0]),
)
def test_later_tokens_of_a_long_prompt_score_more(impl, case, sink_size):
    """Of thousands of tokens each scores more than the one before it: none of them tie. None scores more
    than a sink.
    """
    sink_size = min(sink_size, case.length // 2)  # a domain may know no longer prompts
    scores = impl.streaming_llm.score(case.keys, sink_size=sink_size)
    require_numbers(scores, case.keys.shape[:3], "the score")
    others = scores[..., sink_size:]
    lowest_sink = scores[..., :sink_size].min(axis=-1, initial=np.inf)
    equal(lowest_sink >= others.max(axis=-1), True, "a token scores more than a sink")
    equal(
        others[..., 1:] > others[..., :-1], True, "a later token does not score more than the one before it"
    )
