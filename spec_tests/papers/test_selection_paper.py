"""A law about exact budgets that judges no implementation
(SEL-1): a ratio is read as the decimal that was written.
"""

from fractions import Fraction

from evictionary.reference import lagkv, selection
from evictionary.spec_tests.judge.law import law


@law("SEL-1")
def test_exact_ratios_are_read_as_written():
    """The budgets that binary floats lose: int(10 * (1 - 0.9)) is 0 and int(100 * 0.29) is 28."""
    assert selection.budget(10, 0.9) == 1
    assert lagkv.tokens_per_partition(0.29, 100) == 29
    assert lagkv.tokens_per_partition(Fraction(7, 96), 96) == 7
