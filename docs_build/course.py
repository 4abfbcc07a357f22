"""Tables of the classroom: the plan of a course, docs/classroom/course.toml, and the walls of each system."""

import tomllib
from typing import Any

from docs_build.entries import ROOT
from docs_build.handouts import cells
from evictionary.claims.claim import read_paper
from evictionary.classroom import assignment as assignments, child, exam, sandbox
from evictionary.store import table
from tutorials.build import heading, lessons

PLAN = ROOT / "docs" / "classroom" / "course.toml"


def plan() -> list[dict[str, Any]]:
    """The weeks, each with lessons, papers, readings, assignments at home, and what else there is."""
    return list(tomllib.loads(PLAN.read_text(encoding="utf-8"))["week"])


def hours(names: list[str]) -> tuple[float, float]:
    """The hours that assignments take, at least and at most."""
    each = [assignments.load(name).hours for name in names]
    return sum(one[0] for one in each), sum(one[-1] for one in each)


def _in_words(least: float, most: float) -> str:
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def weeks(page: str) -> str:
    """A row for each week: lessons, readings, what is done
    at home with its hours, and the questions of the exam.
    """
    by_name = {lesson.stem.partition("_")[2]: lesson for lesson in lessons()}
    rows = []
    for number, week in enumerate(plan(), 1):
        own = [by_name[name] for name in week["lessons"]]
        papers = [(name, read_paper(name)) for name in week.get("papers", [])]
        read = [
            f"[{one.title}](https://arxiv.org/abs/{one.arxiv}), with [its page](../methods/{name}.md)"
            for name, one in papers
        ]
        read += [f"[{called}](../{file})" for called, file in week.get("read", [])]
        home = [f"[{name}](handout_{name}.md)" for name in week["at_home"]]
        home += [week["also"]] if "also" in week else []
        asked = [name.replace("_", " ") for name in week["lessons"] if name in exam.QUESTIONS]
        taught = "; ".join(f"[{heading(lesson)}](../lessons/{lesson.name})" for lesson in own)
        took = _in_words(*hours(week["at_home"])) if week["at_home"] else ""
        rows.append((str(number), taught, "; ".join(read), "; ".join(home), took, ", ".join(asked)))
    head = ["week", "in class", "read before", "at home", "hours of the assignments", "asked in the exam"]
    return table(head, rows)


def handed_in(page: str) -> str:
    """A row for each assignment of the plan: its week, hours, points and what is handed in."""
    rows = [
        (f"[{name}](handout_{name}.md)", str(number), *cells(name))
        for number, week in enumerate(plan(), 1)
        for name in week["at_home"]
    ]
    least, most = hours([name for week in plan() for name in week["at_home"]])
    total = f"All of them take {_in_words(least, most)} hours."
    return table(["assignment", "week", "hours", "points", "you hand in"], rows) + f"\n\n{total}"


def systems(page: str) -> str:
    """A row for each system: the walls around a student's code there, and what runs with them."""
    rows = [
        (
            name,
            ", ".join(f"`{wall}`" for wall in walls) or "none",
            "runs" if walls else "does not run; in WSL it does, as on Linux",
            "runs" if {*child.KEEP_FILES} & {*walls} else "writes no grade" if walls else "as `check`",
        )
        for name, walls in sandbox.WALLS.items()
    ]
    return table(["system", "walls, by their names in `grade.json`", "`check`", "`grade`"], rows)
