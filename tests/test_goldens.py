"""No law, mistake, right variant or requirement of the goldens is gone. What is new is no difference here."""

import pytest

from tests.goldens.__main__ import PARTS, differences, stored


@pytest.mark.parametrize("part", ["laws", "mistakes", "kills", "variants", "requirements"])
def test_nothing_is_gone_or_says_something_else(part):
    assert [line for line in differences(stored()[part], PARTS[part]()) if not line.startswith("new: ")] == []
