"""No paragraph of a docstring ends in one or two words that even lines would take along."""

from tests.paragraphs import ROOT, files, mended

SHORT = '''def f():
    """The first line of a paragraph is as long as a line may be, and the second one has a
    word.

    - a list stays
      as it is

    >>> an_example(stays)
    True
    """
'''
EVEN = '''def f():
    """The first line of a paragraph is as long as
    a line may be, and the second one has a word.

    - a list stays
      as it is

    >>> an_example(stays)
    True
    """
'''


def test_lines_are_broken_evenly_and_no_word_is_lost():
    assert mended(SHORT) == EVEN == mended(EVEN)


def test_no_docstring_ends_in_a_short_line():
    """`python -m tests.paragraphs --write` breaks their lines anew."""
    short = [path for path in files() if mended(text := path.read_text(encoding="utf-8")) != text]
    assert [path.relative_to(ROOT) for path in short] == []
