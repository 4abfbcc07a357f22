"""Laws of MomentKV's prompt as its section 5.1 has it: the heads of a layer share the budget (MK-P2)."""

from evictionary.spec_tests.ada_kv.helpers import shared_by_hand
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.momentkv.helpers import SCORE_PROMPT, SELECT_PROMPT, check_prompt, prompt
from evictionary.spec_tests.shared.helpers import without

no_sharing = without(SELECT_PROMPT, "floor_ratio")


def check_shares(impl, states, budget_of, percent, **settings):
    """Raise Violation unless the heads of a layer share a budget as they should; `budget_of` the protected
    tokens of a head.
    """
    kept, safe, budget, mass = check_prompt(impl, states, budget_of, floor_ratio=percent / 100, **settings)
    heads, least, counts = kept.shape[1], int(safe.sum()), kept.sum(axis=-1)
    equal(
        counts.sum(axis=1),
        heads * budget,
        "the heads of a layer keep another number of tokens than they share",
    )
    share = least + percent * (budget - least) // 100
    require(
        (counts >= share).all(),
        "a head keeps fewer tokens than what is protected and its share of the rest",
        share,
        counts,
    )
    ones = np.ones((*kept.shape, 1))
    of_mass = impl.allowance(SCORE_PROMPT, *states[:2], ones, chunk_size=settings.get("chunk_size", 4))
    for layer, numbers in zip(mass, counts, strict=True):
        best = layer[shared_by_hand(layer, budget, percent / 100, np.broadcast_to(safe, layer.shape))].sum()
        # The most attention that heads with these numbers of tokens can hold.
        free = [
            sorted(head[~safe], reverse=True)[: count - least]
            for head, count in zip(layer, numbers, strict=True)
        ]
        held = layer[:, safe].sum() + sum(map(sum, free))
        enough = held >= best or held >= best - 2 * (of_mass.largest + 1e-12) * heads * budget
        require(enough, "other shares of the budget hold more of the attention", best, held)


@law(
    "MK-P2",
    of=SELECT_PROMPT,
    not_for=no_sharing,
    case=seeded_cases(min_length=5, max_length=33),
    seed=seeds(),
    spare=st.integers(0, 12),
    percent=st.sampled_from([0, 20, 50, 100]),
    settings=st.sampled_from([{}, {"sink_size": 3, "chunk_size": 2}]),
)
def test_heads_share_the_budget_and_each_keeps_its_first_token_and_its_window(
    impl, case, seed, spare, percent, settings
):
    """First token and window stay in every head; attention shares out the rest of H_kv * budget, the score
    chooses the tokens.
    """
    check_shares(impl, prompt(case, seed), lambda safe: safe + spare, percent, **settings)


@law(
    "MK-P2",
    of=SELECT_PROMPT,
    not_for=no_sharing,
    examples=1,
    seed=seeds(),
    percent=st.sampled_from([20, 58, 29]),
)
def test_heads_share_the_budgets_of_the_paper(impl, seed, percent):
    """The same for a window of 32 tokens, chunks of 4 and budgets of 64 to 1,024; 58 of 100 is no number
    of binary digits.
    """
    for case in narrow(impl, seed, [budget + 67 for budget in BUDGETS], batch=1, num_kv_heads=3):
        states = prompt(case, seed, 32)
        check_shares(impl, states, lambda safe, length=case.length: max(safe, length - 67), percent)


@law("MK-P2", of=SELECT_PROMPT, not_for=no_sharing, examples=1, seed=seeds())
def test_at_the_budgets_of_the_paper_attention_gets_the_free_places(impl, seed):
    """Head 0 looks at half of its free tokens alone, head 1 at all tokens alike: these first, then those,
    then the others.
    """
    for case in narrow(impl, seed, [budget + 67 for budget in BUDGETS], batch=1, num_kv_heads=2):
        length, looked_at, free = case.length, (case.length - 36) // 8 * 4, case.length - 33
        keys, query = np.zeros_like(case.keys), np.zeros((1, 2 * case.group, 32, case.head_dim))
        keys[0, 0, :, 0], query[..., 0] = -20.0, case.head_dim**0.5
        keys[0, 0, 4 : 4 + looked_at] = 0
        places = 2 * (length - 67 - 33)
        others = min(free, places - min(looked_at, places))
        kept = impl.momentkv.select_prompt(
            query, keys, np.ones_like(case.values), length - 67, floor_ratio=0.0
        )
        require_mask(kept, keys.shape[:3], "the selection")
        equal(
            kept.sum(axis=-1),
            np.array([[33 + places - others, 33 + others]]),
            "the heads share a budget otherwise",
        )


@law(
    "MK-P2",
    of=SELECT_PROMPT,
    not_for=no_sharing,
    keen=st.integers(0, 1),
    shares=st.sampled_from([(0.0, 4, 2), (0.5, 4, 2), (1.0, 3, 3)]),
)
def test_the_head_that_attends_to_the_free_tokens_gets_the_free_places(impl, keen, shares):
    """Of two heads one looks at its free tokens alone: it gets both free places, though the values of the
    other are much longer.
    """
    floor_ratio, more, fewer = shares
    keys, values = np.zeros((1, 2, 6, 2)), np.ones((1, 2, 6, 2))
    # so the keen head gives 1/4 to each token between, the other 1/6 to every token
    keys[0, keen, [0, 5], 0] = -20
    values[0, keen, :, 0] = [1, 1, 2, 4, 3, 1]
    values[0, 1 - keen, :, 0] = [40, 60, 40, 40, 40, 40]
    query = np.zeros((1, 2, 1, 2))
    query[..., 0] = 1
    kept = impl.momentkv.select_prompt(query, keys, values, 3, chunk_size=1, floor_ratio=floor_ratio)
    expected = np.zeros((1, 2, 6), dtype=bool)
    expected[0, keen, [0, 5, 3, 4][:more]] = expected[0, 1 - keen, [0, 5, 1][:fewer]] = True
    equal(kept, expected, "the heads share the free places otherwise, or keep other tokens in them")


@law("MK-P2", of=SELECT_PROMPT, kind="refusal", not_for=no_sharing)
def test_a_shared_budget_below_the_protected_tokens_is_refused(impl):
    """Two places in a head, for a first token and a window of two, raise ValueError."""
    states = np.ones((1, 2, 6, 2))
    if impl.reads_numbers:
        refused(impl, "protected", SELECT_PROMPT, states[:, :, :2], states, states, 2, floor_ratio=0.2)
