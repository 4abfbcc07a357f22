"""The comparison that each of the five papers puts first, beside the costs of the same methods in the study.

A paper compares its method with others at several sizes of the cache. Here the difference to the best of the
others, of the same prompts, has an interval: below 0 the order is the paper's, above 0 it is the other one.
"""

from collections.abc import Iterator
from typing import NamedTuple

from docs_build.study import interval, measured


class Abstract(NamedTuple):
    """A comparison of a paper: our id of it, what the paper says, the method and the others as the study
    names them, and the part of the study. `own` where the method sets its own size.
    """

    id: str
    paper: str
    says: str
    method: str
    others: tuple[str, ...]
    part: str = "results"
    own: bool = False


ABSTRACTS = (
    Abstract(
        "KD-T1",
        "keydiff",
        "KeyDiff scores higher on LongBench than H2O, TOVA, SnapKV and StreamingLLM do with the same budget",
        "keydiff",
        ("h2o", "tova", "snapkv", "streaming_llm"),
    ),
    Abstract(
        "LK-S1",
        "lagkv",
        "LagKV scores higher on RULER than SnapKV and StreamingLLM at different sizes",
        "lagkv",
        ("snapkv", "streaming_llm"),
    ),
    Abstract(
        "EA-T1",
        "expected_attention",
        "Expected Attention, with budgets divided among heads, scores higher on RULER than TOVA, SnapKV and "
        "KeyDiff in most cells",
        "expected_attention+ada_kv",
        ("tova", "snapkv", "keydiff"),
    ),
    *(
        Abstract(
            f"EA-T1, texts of {tokens} tokens",
            "expected_attention",
            "the same beside KeyDiff, on texts that people wrote",
            "expected_attention+ada_kv",
            ("keydiff",),
            part,
        )
        for tokens, part in (("1,000", "real"), ("2,000", "real_2000"), ("4,000", "real_4000"))
    ),
    Abstract(
        "MK-S1",
        "momentkv",
        "MomentKV scores higher on LongBench and RULER than all others at every budget; these are H2O, "
        "SnapKV, PyramidKV and AdaKV",
        "momentkv+ada_kv",
        ("h2o", "snapkv", "snapkv+ada_kv"),
    ),
    Abstract(
        "GV-F4",
        "gvote",
        "GVote needs half of the memory, while its accuracy is higher or comparable; the others are "
        "StreamingLLM, SnapKV and AdaKV",
        "gvote",
        ("streaming_llm", "snapkv", "snapkv+ada_kv"),
        own=True,
    ),
)
SAME, OTHER, LEVEL = "the paper's order", "the other order", "level"


class Row(NamedTuple):
    """A comparison at one size: the cost of the method and of the best of the others, the difference and its
    interval, in nats a token, and how many tokens of a hundred the method keeps.
    """

    removed: float
    cost: float
    best: str
    of_best: float
    low: float
    high: float
    kept: float

    @property
    def difference(self) -> float:
        return self.cost - self.of_best

    @property
    def verdict(self) -> str:
        """What the interval says of the order."""
        return SAME if self.high < 0 else OTHER if self.low > 0 else LEVEL


def rows(abstract: Abstract) -> Iterator[Row]:
    """The comparison at each size. A method that sets its own size is compared with the others at each."""
    for removed, found in measured(abstract.part).items():
        own = found[abstract.method]
        best = min(abstract.others, key=lambda name: found[name].cost)
        length = found[best].kept / (1 - removed)
        yield Row(
            removed,
            own.cost,
            best,
            found[best].cost,
            *interval(own, found[best]),
            100 * own.kept / length,
        )
