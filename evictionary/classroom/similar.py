"""Which submissions are much alike: the shares of code that pairs of files have in common.

Python's own tokenizer reads a file. Comments, texts and the names that were chosen are left out. Two
files are alike in the runs of tokens that both have (the containment of Broder, "On the resemblance
and containment of documents", 1997). What the starter file has too does not count. Nothing of a
submission is run.
"""

import builtins
import io
import keyword
import token
import tokenize
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from evictionary import reference

# Decision: five, and every run counts. So all disguised copies of the tests share more than any two files
# of their own (docs/decisions.md).
RUN = 5  # tokens in a run
_PLAIN = {*keyword.kwlist, *dir(builtins), "np", "numpy", "torch"}
_LEFT_OUT = {token.COMMENT, token.NL, token.NEWLINE, token.STRING, token.INDENT, token.DEDENT, token.ENCODING}


class Pair(NamedTuple):
    """Two students, and the share of the shorter file's runs that the other one has, from 0 to 1."""

    one: str
    other: str
    share: float


def runs(source: bytes) -> frozenset[tuple[str, ...]]:
    """The runs of a file; none for a file that is no Python or is shorter than a run."""
    words = [*_words(source)]
    return frozenset(tuple(words[place : place + RUN]) for place in range(len(words) - RUN + 1))


def _words(source: bytes) -> Iterator[str]:
    """The tokens of a file; a name that somebody chose is `name`, unless it follows a dot."""
    try:
        found = [*tokenize.tokenize(io.BytesIO(source).readline)]
    except (SyntaxError, tokenize.TokenError, UnicodeDecodeError):
        return
    before = ""
    for each in found:
        if each.type in _LEFT_OUT:
            continue
        is_chosen = each.type == token.NAME and each.string not in _PLAIN and before != "."
        yield "name" if is_chosen else each.string
        before = each.string


def model(stem: str) -> dict[str, bytes]:
    """The project's own right answer, which students have too, under a name that no id can be; empty where
    there is none.
    """
    file = Path(next(iter(reference.__path__))) / f"{stem}.py"
    return {f"reference/{file.name}": file.read_bytes()} if file.is_file() else {}


def pairs(sources: Mapping[str, bytes], starter: bytes, least: float) -> list[Pair]:
    """The pairs of students whose files share at least so much, the most alike first."""
    common = runs(starter)
    own = {student: runs(source) - common for student, source in sources.items()}
    found = [
        Pair(one, other, len(own[one] & own[other]) / min(len(own[one]), len(own[other])))
        for one, other in combinations(sorted(own), 2)
        if own[one] and own[other]
    ]
    return sorted((pair for pair in found if pair.share >= least), key=lambda pair: (-pair.share, pair[:2]))
