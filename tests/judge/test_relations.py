"""A law whose sentence relates two answers tests its sentence: it passes an implementation that keeps the
relation, whatever its numbers are, and fails one that breaks it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from evictionary.spec_tests.judge.implementation import Implementation, load
from evictionary.spec_tests.judge.law import LAWS, Law, load_laws
from evictionary.spec_tests.judge.outcome import outcome

# The verbs that know what an answer has to be.
OF_VALUES = {"agrees", "near", "rounds_to", "lies", "equal", "totals", "selects", "recovers", "require"}

load_laws()


def of_values(law: Law) -> bool:
    return not OF_VALUES.isdisjoint(inspect.unwrap(law.check).__code__.co_names)


WITH_VERBS = sorted(name for name, law in LAWS.items() if law.relates)
# Laws that relate answers in words of their own: selections, or numbers that a law combines.
IN_WORDS = [
    "test_chunk_kv::test_each_head_of_each_batch_item_chooses_for_itself",
    "test_gvote::test_heads_do_not_see_each_other",
    "test_gvote::test_the_length_of_a_sample_does_not_matter",
    "test_kvzip::test_a_longer_replay_never_lowers_a_score",
    "test_lagkv::test_tokens_after_the_next_partition_do_not_matter",
    "test_rope::test_a_dot_product_depends_on_the_distance_only",
    "test_rope::test_each_token_turns_by_its_own_position",
    "test_streaming_llm::test_only_positions_count",
    "test_triattention::test_a_constant_added_to_all_positions_changes_nothing",
]
# A law of both kinds relates answers and says what one of them is: wrong numbers fail it, rightly.
PURE = [name for name in WITH_VERBS if not of_values(LAWS[name])] + IN_WORDS


@dataclass(repr=False)
class Altered(Implementation):
    """The reference, whose answers are altered: `alter` is given each and which call of the example it is.

    What only moves states, and computes nothing, stays as it is.
    """

    alter: Callable[[np.ndarray, int], np.ndarray] = lambda answer, place: answer

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        answer = super().call(path, *args, **kwargs)
        place = len(self.calls)
        if path.endswith(".append"):
            return answer
        if isinstance(answer, tuple):
            entries = (self._altered(entry, place) for entry in answer)
            return type(answer)(*entries) if hasattr(answer, "_fields") else tuple(entries)
        return self._altered(answer, place)

    def _altered(self, answer: Any, place: int) -> Any:
        return self.alter(answer, place) if isinstance(answer, np.ndarray) else answer


def altered(alter: Callable[[np.ndarray, int], np.ndarray]) -> Altered:
    plain = load("reference")
    return Altered("reference, altered", plain.modules, plain.origin, alter=alter)


def thrice(answer: np.ndarray, place: int) -> np.ndarray:
    """And of a selection what it leaves out."""
    return ~answer if answer.dtype == bool else 3 * answer


def one_more(answer: np.ndarray, place: int) -> np.ndarray:
    return answer + 1


def wavering(answer: np.ndarray, place: int) -> np.ndarray:
    if answer.dtype == bool:
        return answer ^ bool(place % 2)
    change = place / 32 * (-1) ** (place + 1)
    return answer * (1 + change) + change


# What keeps a relation that thrice the numbers would break.
KEEPS = {"test_momentkv_attend::test_moving_all_values_moves_the_output": one_more}


@pytest.mark.parametrize("name", PURE)
def test_wrong_numbers_that_keep_the_relation_pass(name: str) -> None:
    said = outcome(LAWS[name], altered(KEEPS.get(name, thrice)), max_examples=10)
    assert said == ("passed", "")


@pytest.mark.parametrize("name", WITH_VERBS + IN_WORDS)
def test_numbers_that_change_from_call_to_call_break_it(name: str) -> None:
    assert outcome(LAWS[name], altered(wavering), max_examples=10)[0] == "killed"


def test_most_relations_are_asked_alone() -> None:
    """So that a report of one is about the relation."""
    assert len(PURE) > 3 / 4 * len(WITH_VERBS + IN_WORDS)
