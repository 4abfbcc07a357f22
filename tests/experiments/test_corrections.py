"""The table of docs/methods/momentkv_bounded.md: the promised columns are zero, and the others are not."""

import numpy as np
import pytest

from benchmarks import corrections


@pytest.mark.parametrize("kind", corrections.KINDS)
def test_the_promises_hold_on_drawn_steps(kind) -> None:
    generator = np.random.default_rng(1)
    evicted = np.broadcast_to(
        np.arange(corrections.LENGTH) < corrections.EVICTED, (corrections.AT_ONCE, 1, corrections.LENGTH)
    )
    none, paper, nearest, certified = corrections.errors(*kind(generator), evicted)
    assert (nearest <= paper + corrections.ROUNDING).all() and (
        certified <= none + corrections.ROUNDING
    ).all()
    assert certified.mean() < none.mean()


def test_the_table_has_a_row_for_each_kind() -> None:
    rows = list(corrections.rows(steps=corrections.AT_ONCE))
    assert [row[0] for row in rows] == [kind.__name__ for kind in corrections.KINDS]
    assert {len(row) for row in rows} == {1 + len(corrections.COLUMNS)} == {9}
