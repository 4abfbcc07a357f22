"""What an assignment takes, at the top of its handout, from its assignment.toml: `python -m
docs_build.handouts` writes it into the handouts, for readers of the files themselves.
"""

import re

from evictionary.classroom import assignment as assignments, names
from evictionary.store import table

NUMBERS = ("no", "one", "two", "three", "four", "five")


def glance(name: str) -> str:
    """The hours, the points and what is handed in, as a table."""
    one = assignments.load(name)
    asked = len(one.questions)
    words = f"{NUMBERS[asked]} question{'s' * (asked != 1)} in words"
    points = f"{one.max_score} from the grader, {sum(one.questions)} for {words}"
    handed_in = (
        f"`{name}.zip`, which `evictionary submit {name}` packs; your answers to the {words}, on one page"
    )
    return table(["hours", "points", "you hand in"], [(one.takes, points, handed_in)])


def written(name: str, markdown: str) -> str:
    """The handout with the table below its marker."""
    block = f"<!-- glance -->\n{glance(name)}\n<!-- end -->"
    return re.sub(r"<!-- glance -->\n.*?<!-- end -->", lambda _: block, markdown, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    for name in names():
        path = assignments.load(name).folder / "README.md"
        path.write_text(written(name, path.read_text(encoding="utf-8")), encoding="utf-8")
