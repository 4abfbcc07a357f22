"""What a page tells a reader to type, and what it loads."""

import html.parser
import re
from pathlib import Path

from evictionary.evaluation.demo import METHOD_PAGES

ROOT = Path(__file__).parents[2]


def blocks(page: Path, languages: str) -> list[str]:
    """The fenced blocks of a page in these languages, separated
    by |; an empty name is a block without a language.
    """
    fences = re.findall(
        r"^ *(`{3,})([^`\n]*)\n(.*?)^ *\1$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return [body for _, language, body in fences if language in languages.split("|")]


def commands(page: Path) -> list[str]:
    """The lines of a page that call `evictionary`, in a
    block or as code inside a sentence, without comments.
    """
    lines = [
        line.strip().removeprefix("$ ")
        for block in blocks(page, "|text|bash|console")
        for line in _joined(block)
    ]
    spans = re.findall(r"`(evictionary [^`]+)`", page.read_text(encoding="utf-8"))
    found = [line for line in [*lines, *spans] if line.startswith("evictionary ")]
    return list(dict.fromkeys(" ".join(line.partition("  #")[0].split()) for line in found))


def _joined(block: str) -> list[str]:
    return re.sub(r"\\\n\s*", "", block).splitlines()


def pictures_of(path: Path) -> int:
    """The number of pictures of an HTML page. Fail if the page loads anything: each picture has to be inside.
    A link to the page of a method loads nothing.
    """
    page = re.sub(rf'<a href="{METHOD_PAGES}/\w+\.md">', "<a>", path.read_text(encoding="utf-8"))
    html.parser.HTMLParser().feed(page)
    assert not re.findall(r"https?://", page)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert all(source.startswith("data:") for source in sources)
    return len(sources)
