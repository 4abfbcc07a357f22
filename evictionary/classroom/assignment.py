"""An assignment: a folder of tutorials/assignments/ with handout, starter file, assignment.toml and the instructor's note."""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from evictionary.classroom import ASSIGNMENTS, names
from evictionary.classroom.child import Limits
from evictionary.errors import UsageError


@dataclass(frozen=True)
class Step:
    """One line of the grade: a requirement of the paper, or a part of it, the laws that judge it, and its points.

    `needs` names the steps that must pass before this step is judged; `read` says where to read about it. `check` names a check
    of the grader beside the laws: constants (the student's own defaults), overflow (LagKV's deviations in the thousands), votes
    (GVote's samples, each by itself), blocks (H2O's scores of a prompt whose matrix the memory does not hold), kernel (the scores
    depend on what a Triton kernel writes) or rows (the student's rows of scores show the planted mistakes of `catches`; `longest`
    bounds the tokens of a step with one row, 0 stands for many rows). `calm` leaves out inputs on which a softmax without its
    maximum overflows, so that one mistake does not cost a step by luck.
    `thoroughness` multiplies the number of inputs that each law draws, for mistakes that show on few inputs.
    """

    name: str
    requirement: str
    title: str
    points: int
    laws: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    read: str = ""
    check: str = ""
    thoroughness: int = 1
    calm: bool = False
    catches: tuple[str, ...] = ()
    longest: int = 0


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

    @property
    def max_score(self) -> int:
        return sum(step.points for step in self.steps)

    @property
    def dtype(self) -> str:
        return "float64" if self.library == "numpy" else "float32"

    @property
    def starter(self) -> Path:
        return self.folder / "starter.py"

    def limits(self, seconds: float | None = None) -> Limits:
        """The limits of a child process for one step; `seconds` replaces the assignment's own limit."""
        wall = self.seconds if seconds is None else seconds
        return Limits(wall, max(1, round(wall)), int(self.memory_gib * 2**30))

    def constants_of(self, student: str) -> dict[str, float]:
        """The constants of one student: drawn from the id, the same each time, from the values that assignment.toml lists."""
        drawn = {}
        for name, values in self.constants.items():
            digest = hashlib.sha256(f"{self.name}/{name}/{student}".encode()).digest()
            drawn[name] = values[int.from_bytes(digest[:8], "big") % len(values)]
        return drawn

    def starter_for(self, student: str | None) -> str:
        """The starter file; with a student's id, the defaults of its functions are that student's constants."""
        text = self.starter.read_text(encoding="utf-8")
        for name, value in (self.constants_of(student) if student else {}).items():
            text = re.sub(rf"(\b{name}: \w+ = )[\d.]+", rf"\g<1>{value}", text)
        return text


def load(name: str, folder: Path | None = None) -> Assignment:
    """Read an assignment. Raises UsageError if no assignment of the folder has that name, and for a mistake in its file."""
    if name not in names(folder):
        wanted = ", ".join(names(folder)) or "a folder with an assignment.toml in it"
        raise UsageError(f"assignment: got {name!r}, wanted one of {wanted}")
    folder = (folder or ASSIGNMENTS).resolve() / name
    try:
        content: dict[str, Any] = tomllib.loads((folder / "assignment.toml").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"{folder.name}/assignment.toml: wanted a TOML file: {error}") from None
    steps = content.pop("step", None)
    if not isinstance(steps, list) or not steps or not all(isinstance(each, dict) for each in steps):
        raise UsageError(f"{folder.name}/assignment.toml: got no step, wanted one [[step]] or more")
    for number, given in enumerate(steps, 1):
        _require_fields(f"{folder.name}/assignment.toml, step {given.get('name', number)!r}", given, Step, ())
    _require_fields(f"{folder.name}/assignment.toml", content, Assignment, ("name", "folder", "steps"))
    one = Assignment(name=name, folder=folder, steps=tuple(_step(given) for given in steps), **content)
    _require_whole(one)
    return one


_TYPES = {"str": str, "int": int, "float": int | float, "bool": bool, "tuple[str, ...]": list, "dict[str, list[float]]": dict}
_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple[str, ...]": "a list of texts",
}


def _require_fields(where: str, given: dict[str, Any], kind: type, own: tuple[str, ...]) -> None:
    """Raise UsageError unless the fields are those of the class but its `own`, and each has its type."""
    known = {each.name: each for each in fields(kind) if each.name not in own}
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"{where}: got {name!r}, wanted some of {', '.join(known)}")
        written = str(known[name].type)
        is_right = isinstance(value, _TYPES[written]) and isinstance(value, bool) == (written == "bool")
        if not is_right or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
            raise UsageError(f"{where}: {name}: got {value!r}, wanted {_WORDS.get(written, 'a table')}")
    for name, each in known.items():
        if name not in given and each.default is MISSING and each.default_factory is MISSING:
            raise UsageError(f"{where}: got no {name}, wanted one")


def _require_whole(one: Assignment) -> None:
    """Raise UsageError for what would take points from a whole class in silence, or end the grader later."""
    from evictionary.classroom import checks
    from evictionary.spec_tests.harness.law import REQUIREMENTS, load_laws
    from evictionary.spec_tests.harness.planted import load_mutants

    def require(holds: object, where: str, got: object, wanted: str) -> None:
        if not holds:
            raise UsageError(f"{one.name}/assignment.toml{where}: got {got!r}, wanted {wanted}")

    require(one.library in ("numpy", "torch"), ": library", one.library, "numpy or torch")
    path = Path(one.file)
    require(
        path.suffix == ".py" and not path.is_absolute() and ".." not in path.parts, ": file", one.file, "a name such as work.py"
    )
    require(one.stem.isidentifier(), ": stem", one.stem, "the name of a module")
    require(one.seconds > 0 and one.memory_gib > 0, ": seconds, memory_gib", (one.seconds, one.memory_gib), "more than 0")
    require(one.starter.is_file(), ": starter.py", "none beside it", "the file that `evictionary start` writes")
    earlier: list[str] = []
    for step in one.steps:
        where, laws = f", step {step.name!r}: ", load_laws() if step.laws else {}
        require(step.name not in earlier, where + "name", step.name, "a name that no other step has")
        require(step.points > 0, where + "points", step.points, "at least 1")
        require(step.thoroughness > 0, where + "thoroughness", step.thoroughness, "at least 1")
        require(step.requirement in REQUIREMENTS, where + "requirement", step.requirement, "the id of a requirement, such as KD-8")
        require(step.laws or step.check or one.contest, where + "laws", [], "at least one law, or a check")
        for law in step.laws:
            near = difflib.get_close_matches(law, laws, 1, 0) if law not in laws else []
            require(law in laws, where + "laws", law, f"a law of the suite, such as {''.join(near)}")
        for need in step.needs:
            require(need in earlier, where + "needs", need, f"a step before it: {', '.join(earlier) or 'there is none'}")
        for mistake in step.catches:
            require(
                mistake in load_mutants(), where + "catches", mistake, "a planted mistake, such as selection.lanes_past_the_end"
            )
        try:
            if step.check:
                checks.law(step, one.stem, {}, 0)
        except KeyError:
            require(False, where + "check", step.check, "a check of the grader that this stem has")
        earlier.append(step.name)


def _step(given: dict[str, Any]) -> Step:
    typed: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Step(**typed)
