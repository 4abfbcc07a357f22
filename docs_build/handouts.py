"""What an assignment takes, at the top of its handout, from its assignment.toml: `python -m
docs_build.handouts` writes it into the handouts, for readers of the files themselves.
"""

import re

from evictionary.classroom import assignment as assignments, names
from evictionary.store import table

NUMBERS = ("no", "one", "two", "three", "four", "five")


def cells(name: str) -> tuple[str, str, str]:
    """The hours, the points and what is handed in, in words."""
    one = assignments.load(name)
    asked = len(one.questions)
    words = f"{NUMBERS[asked]} question{'s' * (asked != 1)} in words"
    packed = f"`{name}.zip`, which `evictionary submit {name}` packs"
    return (
        one.takes,
        f"{one.max_score} from the grader, {sum(one.questions)} for {words}",
        f"{packed}; your answers to the {words}, on one page",
    )


def glance(name: str) -> str:
    """The table at the top of a handout."""
    return table(["hours", "points", "you hand in"], [cells(name)])


def written(name: str, markdown: str) -> str:
    """The handout with the table below its marker."""
    block = f"<!-- glance -->\n{glance(name)}\n<!-- end -->"
    return re.sub(r"<!-- glance -->\n.*?<!-- end -->", lambda _: block, markdown, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    for name in names():
        path = assignments.load(name).folder / "README.md"
        path.write_text(written(name, path.read_text(encoding="utf-8")), encoding="utf-8")
