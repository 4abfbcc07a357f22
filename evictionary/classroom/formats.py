"""grade.json, the one canonical result, and the files derived
from it: Gradescope, Classroom 50, JUnit and Markdown.
"""

import contextlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from jsonschema import Draft202012Validator, validators

from evictionary.classroom.child import visible
from evictionary.errors import require
from evictionary.store import table

SCHEMA, GRADE = "evictionary/grade/4", "grade.json"
SCHEMAS = Path(__file__).parent / "schemas"
_TYPES = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
_Strict = validators.extend(Draft202012Validator, type_checker=_TYPES)


@cache
def validator(name: str) -> Any:
    """The validator of schemas/<name>.json; 2.0 is no whole number."""
    return _Strict(json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8")))


def gradescope(grade: dict[str, Any]) -> str:
    """results.json of Gradescope: one test for each step, and the leaderboard if the assignment has one."""
    content: dict[str, Any] = {
        "score": grade["score"],
        "execution_time": grade["seconds"],
        "output": grade["error"] or blocked(grade) or f"{grade['score']} of {grade['max_score']} points",
        "stdout_visibility": "hidden",
        "tests": [
            {
                "name": _named(line, "title"),
                "number": str(number),
                "score": line["points"],
                "max_score": line["max_points"],
                "status": "passed" if line["verdict"] == "passed" else "failed",
                "output": _told(line),
                "output_format": "text",
                "visibility": "visible",
            }
            for number, line in enumerate(grade["lines"], 1)
        ],
        "extra_data": {
            "assignment": grade["assignment"],
            "schema": grade["schema"],
            "graded_at": grade["graded_at"],
        },
        **({"leaderboard": grade["leaderboard"]} if grade["leaderboard"] else {}),
    }
    validator("gradescope").validate(content)
    return json.dumps(content, indent=1) + "\n"


def blocked(grade: dict[str, Any]) -> str:
    """Why the grader could not judge some step, in one sentence; an empty string if it judged all."""
    reasons = [line["reason"] for line in grade["lines"] if line["verdict"] == "blocked"]
    return f"Blocked, which is not the student's doing: {reasons[0]}" if reasons else ""


def classroom50(grade: dict[str, Any]) -> str:
    """result.json of Classroom 50: strict keys, whole numbers. Names and ids come from the environment
    variables of its runner.
    """
    here = os.environ.get
    commit = here("COMMIT_URL", "local")
    content = {
        "schema": "classroom50/result/v1",
        "classroom": here("CLASSROOM", "local"),
        "assignment": here("ASSIGNMENT", grade["assignment"]),
        "assignment_type": here("ASSIGNMENT_TYPE", "individual"),
        "owner": here("OWNER") or here("USERNAME") or grade["student"],
        "submission": here("SUBMISSION_TAG", "submit/local"),
        "commit": commit,
        "release": here("RELEASE_URL", "local"),
        "review": here("REVIEW_URL") or commit,
        "datetime": grade["graded_at"],
        "score": grade["score"],
        "max-score": grade["max_score"],
        "tests": [
            {
                "test-name": _named(line, "name"),
                "passed": line["verdict"] == "passed",
                "score": line["points"],
                "max-score": line["max_points"],
                "output": _told(line),
            }
            for line in grade["lines"]
        ],
    }
    validator("classroom50").validate(content)
    return json.dumps(content, indent=1) + "\n"


def junit(grade: dict[str, Any]) -> str:
    """JUnit XML: a failed step is a failure; a step that is not judged yet is skipped."""
    counts = {word: sum(line["verdict"] == word for line in grade["lines"]) for word in ("passed", "failed")}
    suite = ElementTree.Element(
        "testsuite",
        name=f"evictionary.{grade['assignment']}",
        tests=str(len(grade["lines"])),
        failures=str(counts["failed"]),
        errors="0",
        skipped=str(len(grade["lines"]) - sum(counts.values())),
        time=str(grade["seconds"]),
        timestamp=grade["graded_at"].removesuffix("Z"),
    )
    for line in grade["lines"]:
        case = ElementTree.SubElement(
            suite, "testcase", classname=visible(grade["student"]), name=_named(line, "name")
        )
        if line["verdict"] == "failed":
            ElementTree.SubElement(
                case, "failure", message=visible(line["reason"]), type="law"
            ).text = visible(line["message"])
        elif line["verdict"] != "passed":
            ElementTree.SubElement(case, "skipped", message=visible(line["reason"] or grade["error"]))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def markdown(grade: dict[str, Any], counted: str = "") -> str:
    """A Markdown page for the student: the points, and the first failure in full. `counted` is what the
    course makes of the points, if it is something else.
    """
    lines = [f"# {cell(grade['title'])}: {grade['score']} of {grade['max_score']}", ""]
    lines += [f"**Your course counts {cell(counted)}.**", ""] if counted else []
    file = (
        f"{cell(grade['file'])} (SHA-256 {grade['source_sha256'][:16]})"
        if grade["source_sha256"]
        else cell(grade["file"])
    )
    lines += [f"Student {cell(grade['student'])}, file {file or 'none'}, graded {grade['graded_at']}.", ""]
    if grade["error"]:
        lines += [f"Nothing could be judged: {cell(grade['error'])}", ""]
    rows = [
        [
            cell(line["title"]),
            cell(line["requirement"]),
            cell(f"{line['points']} of {line['max_points']}"),
            cell(verdict(line)),
        ]
        for line in grade["lines"]
    ]
    lines.append(table(["step", "requirement", "points", "verdict"], rows))
    first = next((line for line in grade["lines"] if line["verdict"] == "failed" and line["message"]), None)
    if first:
        fence = "`" * 8  # a student's message may hold a fence of its own
        lines += [
            "",
            f"## {cell(first['title'])}",
            "",
            fence,
            visible(first["message"]).replace(fence, ""),
            fence,
            *(["", f"To read: {first['read']}."] if first["read"] else []),
        ]
    return "\n".join(lines) + "\n"


FORMATS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "gradescope": ("results.json", gradescope),
    "classroom50": ("result.json", classroom50),
    "junit": ("junit.xml", junit),
    "markdown": ("grade.md", markdown),
}


# What a message says of running the code: a script, and the command for one law.
_TO_RUN = re.compile(r"^  to see it again, run.*(?:\n    .*)*$", re.MULTILINE)
_ALONE = re.compile(r"\n  this law alone .*")


def for_student(grade: dict[str, Any]) -> dict[str, Any]:
    """The grade in what a student reads: in place of the instructor's commands, the student's own."""
    again = f"  to see it again evictionary check {grade['assignment']}"

    def own(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "message": _ALONE.sub("", _TO_RUN.sub(lambda _: again, line["message"]))}

    return {**grade, "lines": [*map(own, grade["lines"])]}


def verdict(line: dict[str, Any]) -> str:
    """The verdict on a step and its reason. Of a law that failed, the reason is the sentence of the law,
    which is right: the mistake comes after it.
    """
    # A message that is no more than the reason says what happened, such as a function that is missing.
    is_law = line["verdict"] == "failed" and line["laws"] and line["message"] != line["reason"]
    said = f"failed the law: {line['reason']}" if is_law else f"{line['verdict']}, {line['reason']}"
    mistakes = " and ".join(line["misconceptions"])
    looks = f"{said.rstrip('.')}; it looks like: {mistakes}" if mistakes else said
    return looks if line["reason"] else line["verdict"]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write(grade: dict[str, Any], folder: Path, formats: list[str]) -> None:
    """Write grade.json and the derived files into the folder; grade.json is last: its presence means that
    the grading is done.
    """
    validator("grade").validate(grade)
    derived = {FORMATS[name][0]: FORMATS[name][1](for_student(grade)) for name in formats}
    folder.mkdir(parents=True, exist_ok=True)
    require(not folder.is_symlink(), f"{folder} is a link, wanted a folder of the grader's own", OSError)
    for file, content in {**derived, GRADE: json.dumps(grade, indent=1) + "\n"}.items():
        put(folder / file, content)


def put(path: Path, content: str) -> None:
    """Write a result whole, as a new file that takes the place of an earlier one.

    Nothing is written through a link, nor into a file that has another name too. Raises OSError where the
    path is taken by anything but a plain file.
    """
    put_all({path: content})


def put_all(contents: Mapping[Path, str]) -> None:
    """Write several results as `put` does, all or none: each is whole on the disk before one takes its place.

    Raises OSError as `put` does, and for a folder that is missing or cannot be written.
    """
    for path in contents:
        is_free = not os.path.lexists(path) or stat.S_ISREG(path.lstat().st_mode)
        require(is_free, f"{path} is no plain file, wanted none or an earlier result: move it away", OSError)
    mask = os.umask(0o077)
    os.umask(mask)
    partial: dict[Path, str] = {}
    try:
        for path, content in contents.items():
            handle, partial[path] = tempfile.mkstemp(prefix=".", suffix=".partial", dir=path.parent)
            with open(handle, "w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(handle)
            os.chmod(partial[path], 0o666 & ~mask)
        for path, ready in partial.items():
            os.replace(ready, path)
    except BaseException:
        for ready in partial.values():
            Path(ready).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folders(paths: Iterable[Path]) -> Iterator[None]:
    """Make the folders that paths lack; those that are new are deleted again if something inside raises."""
    made: list[Path] = []
    try:
        for path in paths:
            for folder in [each for each in path.parents if not each.exists()][::-1]:
                folder.mkdir()
                made.append(folder)
        yield
    except BaseException:
        for folder in made[::-1]:
            folder.rmdir()
        raise


def read(path: Path) -> dict[str, Any]:
    """A grade.json. Raises ValueError or ValidationError for a damaged one, and for a link."""
    require(not path.is_symlink(), f"{path} is a link", ValueError)
    grade = json.loads(path.read_text(encoding="utf-8"))
    validator("grade").validate(grade)
    return dict(grade)


def _named(line: dict[str, Any], key: str) -> str:
    return f"{line[key]} ({line['requirement']})" if line["requirement"] else str(line[key])


def _told(line: dict[str, Any]) -> str:
    parts = [
        line["reason"],
        line["message"],
        f"To read: {line['read']}." if line["read"] and line["verdict"] != "passed" else "",
    ]
    return "\n\n".join(part for part in parts if part)


# What Markdown reads as more than text, bare addresses too; a number in its place means the character and
# nothing else.
_MARKS = re.compile(r"[\\`*_\[\]!|<>&~#@]|:(?=//)|(?<=www)\.", re.IGNORECASE)


def cell(text: str) -> str:
    """Anybody's text as one cell of a Markdown table, in which no character means more than itself."""
    return " ".join(_MARKS.sub(lambda found: f"&#{ord(found[0])};", visible(text)).split())
