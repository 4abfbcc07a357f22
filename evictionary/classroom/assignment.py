"""An assignment: a folder of tutorials/assignments/ with
handout, starter file, assignment.toml and the instructor's note.
"""

import difflib
import glob
import hashlib
import importlib
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonschema import ValidationError
from jsonschema.exceptions import best_match

from evictionary.classroom import ASSIGNMENTS, formats, names
from evictionary.classroom.child import Limits
from evictionary.classroom.step import Step
from evictionary.errors import UsageError, require, require_known, usage

if TYPE_CHECKING:
    from evictionary.spec_tests.judge.law import Law


@dataclass(frozen=True)
class Assignment:
    """One assignment: the functions to write, and the steps that judge them."""

    name: str
    title: str
    file: str
    stem: str
    library: str
    folder: Path
    steps: tuple[Step, ...]
    interpret: bool = False
    contest: bool = False
    constants: dict[str, list[float]] = field(default_factory=dict)
    memory_gib: float = 2
    seconds: int = 20
    # What no grade depends on is left out of the representation, from which a grade has its digest.
    hours: tuple[float, ...] = field(default=(), repr=False)
    questions: tuple[int, ...] = field(default=(), repr=False)

    @property
    def takes(self) -> str:
        """The hours that it takes, in words: '2', or '3 to 4'."""
        return " to ".join(f"{each:g}" for each in self.hours)

    @property
    def max_score(self) -> int:
        return sum(step.points for step in self.steps)

    @property
    def dtype(self) -> str:
        return "float64" if self.library == "numpy" else "float32"

    @property
    def starter(self) -> Path:
        return self.folder / "starter.py"

    def only(self, name: str) -> "Assignment":
        """The assignment with one step and those that it needs."""
        wanted = {name}
        for step in reversed(self.steps):  # a step needs earlier ones
            wanted |= {*step.needs} if step.name in wanted else set()
        return replace(self, steps=tuple(step for step in self.steps if step.name in wanted))

    def limits(self, seconds: float | None = None) -> Limits:
        """The limits of a child process for one step; `seconds` replaces the assignment's own limit."""
        wall = self.seconds if seconds is None else seconds
        return Limits(wall, max(1, round(wall)), int(self.memory_gib * 2**30))

    def constants_of(self, student: str) -> dict[str, float]:
        """The constants of one student: drawn from the id, the
        same each time, from the values that assignment.toml lists.
        """

        def drawn(name: str) -> int:
            digest = hashlib.sha256(f"{self.name}/{name}/{student}".encode()).digest()
            return int.from_bytes(digest[:8], "big")

        return {name: values[drawn(name) % len(values)] for name, values in self.constants.items()}

    def starter_for(self, student: str | None) -> str:
        """The starter file; with a student's id, the defaults
        of its functions are that student's constants.
        """
        text = self.starter.read_text(encoding="utf-8")
        for name, value in (self.constants_of(student) if student else {}).items():
            text = re.sub(rf"(\b{name}: \w+ = )[\d.]+", rf"\g<1>{value}", text)
        return text


def load(name: str, folder: Path | None = None) -> Assignment:
    """Read an assignment. Raises UsageError if no assignment of the folder has that name, and for a
    mistake in its file.
    """
    require_known("assignment", name, names(folder) or ["a folder with an assignment.toml in it"])
    folder = (folder or ASSIGNMENTS).resolve() / name
    where = f"{name}/assignment.toml"
    with usage(f"{where}: wanted a TOML file", ValueError, OSError):
        content: dict[str, Any] = tomllib.loads((folder / "assignment.toml").read_text(encoding="utf-8"))
    if wrong := best_match(formats.validator("assignment").iter_errors(content)):
        raise UsageError(f"{where}{_told(wrong, content)}")
    steps: list[dict[str, Any]] = [
        {key: tuple(it) if isinstance(it, list) else it for key, it in one.items()}
        for one in content.pop("step")
    ]
    content |= {key: tuple(content.get(key, ())) for key in ("hours", "questions")}
    one = Assignment(name=name, folder=folder, steps=tuple(Step(**step) for step in steps), **content)
    _require_whole(one)
    return one


def _told(wrong: ValidationError, content: dict[str, Any]) -> str:
    """Where a file breaks its schema, and what is wanted there."""
    keys = list(wrong.absolute_path)
    place = ""
    if keys[:1] == ["step"] and len(keys) > 1:
        place, keys = f", step {content['step'][keys[1]].get('name', keys[1] + 1)!r}", keys[2:]
    told = f"got {wrong.instance!r}, wanted {wrong.schema.get('description', 'a text')}"
    if wrong.validator in ("required", "additionalProperties"):
        told = f"{wrong.message}; it may have {', '.join(wrong.schema['properties'])}"
    return ": ".join([place, *map(str, keys[:1]), told])


def law_named(name: str) -> "Law":
    """A law of the suite, such as `test_keydiff::test_scores_are_cosines`. It imports only the file of this
    law, because all files take most of a second. Raises KeyError for an unknown name.
    """
    from evictionary.spec_tests.judge.law import LAWS, SUITE

    for path in SUITE.glob(f"*/{glob.escape(name.partition('::')[0])}.py"):
        importlib.import_module(f"evictionary.spec_tests.{path.parent.name}.{path.stem}")
    return LAWS[name]


def _nearest(name: str) -> str:
    from evictionary.spec_tests.judge.law import load_laws

    return "".join(difflib.get_close_matches(name, load_laws(), 1, 0))


def _require_whole(one: Assignment) -> None:
    """Raise UsageError for what would take points from a whole class in silence, or end the grader later."""
    from evictionary.classroom import checks
    from evictionary.spec_tests.judge.law import REQUIREMENTS
    from evictionary.spec_tests.proof.planted import load_mutants

    def must(holds: object, where: str, got: object, wanted: str) -> None:
        require(holds, f"{one.name}/assignment.toml{where}: got {got!r}, wanted {wanted}")

    must(one.starter.is_file(), ": starter.py", "none beside it", "the file that `evictionary start` writes")
    earlier: list[str] = []
    for step in one.steps:
        where = f", step {step.name!r}: "
        must(step.name not in earlier, where + "name", step.name, "a name that no other step has")
        must(
            step.requirement in REQUIREMENTS,
            where + "requirement",
            step.requirement,
            "the id of a requirement, such as KD-8",
        )
        must(step.laws or step.check or one.contest, where + "laws", [], "at least one law, or a check")
        for law in step.laws:
            try:
                law_named(law)
            except KeyError:
                must(False, where + "laws", law, f"a law of the suite, such as {_nearest(law)}")
        for need in step.needs:
            must(
                need in earlier,
                where + "needs",
                need,
                f"a step before it: {', '.join(earlier) or 'there is none'}",
            )
        for mistake in step.catches:
            wanted = "a planted mistake, such as selection.lanes_past_the_end"
            must(mistake in load_mutants(), where + "catches", mistake, wanted)
        try:
            step.check and checks.law(step, one.stem, {}, 0)
        except KeyError:
            must(False, where + "check", step.check, "a check of the grader that this stem has")
        earlier.append(step.name)
