"""A cache in use: tokens appended, evicted, compressed and
attended to in any order, against plain lists (CACHE-4).
"""

from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from evictionary.spec_tests.judge.prelude import *

NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0])


class CacheInUse(RuleBasedStateMachine):
    """The sequence seen so far, a mask of what is kept of it, and beside them the plain model: a list of
    positions per head.
    """

    impl: Any

    @initialize(heads=st.integers(1, 2), head_dim=st.sampled_from([2, 4]), sink_size=st.integers(0, 2))
    def start(self, heads: int, head_dim: int, sink_size: int) -> None:
        self.keys = self.values = np.zeros((1, heads, 0, head_dim))
        self.kept = np.zeros((1, heads, 0), dtype=bool)
        self.model: list[list[int]] = [[] for _ in range(heads)]
        self.sink_size = sink_size

    @rule(count=st.integers(1, 6), seed=st.integers(0, 99))
    def append(self, count: int, seed: int) -> None:
        """New tokens come in whole."""
        seen = self.kept.shape[2]
        generator = np.random.default_rng(seed)
        shape = (1, len(self.model), count, self.keys.shape[-1])
        self.keys = np.concatenate([self.keys, np.round(generator.normal(size=shape) * 2)], axis=2)
        self.values = np.concatenate([self.values, np.round(generator.normal(size=shape) * 8)], axis=2)
        self.kept = np.concatenate([self.kept, np.ones((1, len(self.model), count), dtype=bool)], axis=2)
        for positions in self.model:
            positions += range(seen, seen + count)

    @precondition(lambda self: self.kept.any())
    @rule(budget=st.integers(1, 8), scores=st.lists(NUMBERS, min_size=8, max_size=8))
    def evict(self, budget: int, scores: list[float]) -> None:
        """Each head keeps its sinks and the best of what
        it still holds; what is gone scores minus infinity.
        """
        held = min(budget, *(len(positions) for positions in self.model))
        sinks = np.broadcast_to(np.arange(self.kept.shape[2]) < min(self.sink_size, held), self.kept.shape)
        ranked = np.where(self.kept, np.resize(scores, self.kept.shape), -np.inf)
        chosen = self.impl.selection.top_k(ranked, held, sinks & self.kept)
        for head, positions in enumerate(self.model):
            rank = sorted(
                positions,
                key=lambda place: (place >= min(self.sink_size, held), -ranked[0, head, place], place),
            )
            self.model[head] = sorted(rank[:held])
        require(not (chosen & ~self.kept).any(), "a token that was evicted came back", self.kept, chosen)
        self.kept = chosen

    @precondition(lambda self: self.kept.any())
    @rule(head=st.integers(0, 1), keep=st.integers(1, 4))
    def trim_one_head(self, head: int, keep: int) -> None:
        """One head alone is cut to its most recent tokens: heads may differ in length."""
        head %= len(self.model)
        self.model[head] = self.model[head][-keep:]
        self.kept = self.kept.copy()
        self.kept[0, head] = np.isin(np.arange(self.kept.shape[2]), self.model[head])

    @precondition(lambda self: self.kept.any())
    @rule(seed=st.integers(0, 99))
    def decode(self, seed: int) -> None:
        """A query attends to what is stored, and to nothing else."""
        queries = np.round(
            np.random.default_rng(seed).normal(size=(1, 2 * len(self.model), 1, self.keys.shape[-1]))
        )
        cache = self.impl.cache.compress(self.keys, self.values, self.kept)
        allowed = self.impl.allowance("attention.attend", queries, cache, pick=0)
        allowed.check(self.impl.attention.attend(queries, cache)[0], "the output over the compressed cache")

    @invariant()
    def the_stored_rows_are_those_of_the_model(self) -> None:
        if not self.kept.any():
            return
        cache = self.impl.cache.compress(self.keys, self.values, self.kept)
        rows = [(head, place) for head, positions in enumerate(self.model) for place in positions]
        equal(
            cache.positions,
            [place for _, place in rows],
            "other positions are stored than a plain list holds",
        )
        for name, states in (("keys", self.keys), ("values", self.values)):
            expected = np.array([states[0, head, place] for head, place in rows])
            equal(getattr(cache, name), expected, f"the stored {name} are not those of their positions")


@law("CACHE-4", of=("cache.compress", "selection.top_k", "attention.attend"))
def test_a_cache_in_use_holds_what_a_plain_list_holds(impl):
    """In any order of appending, evicting, trimming and decoding: budget held, sinks kept, nothing
    regained, K and V together.
    """
    run_state_machine_as_test(
        type("Judged", (CacheInUse,), {"impl": impl}),
        settings=settings(max_examples=20, stateful_step_count=12, deadline=None),
    )
