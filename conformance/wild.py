"""Implementations by others, judged: `python -m conformance.wild [--only NAME]` brings, checks, judges,
and writes docs/wild.md.

Each source of sources.toml comes from its public place, by a shallow fetch of the pinned commit or from the
package index, or from a folder that is given (`--from snapkv=FOLDER`, or WILD_SNAPKV in the environment). The
files that are used have to have the pinned SHA-256. The adapters of `adapters/SOURCE/` turn each calling
convention into the contract, and `evictionary judge` does the rest. A source that cannot be had, or a method
that cannot be judged, costs itself alone. What was found is kept in results.json, from which `--page` writes
the page again without any source. No code of a source is kept in this repository.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from evictionary.errors import require
from evictionary.evaluation.pages import markdown
from evictionary.spec_tests.judge.law import REQUIREMENTS, laws_version
from evictionary.store import grouped, put

HERE = Path(__file__).parent
ROOT = HERE.parent
SOURCES = HERE / "sources.toml"
RESULTS = HERE / "results.json"
PAGE = ROOT / "docs" / "wild.md"
FETCHED = ROOT / "build" / "wild"
MLX = ROOT / "build" / "arrays" / "site-packages"
# Of a failing law's report, what a reader of the page needs.
SHOWN = ("the law", "smallest input", "an input", "what is wrong", "expected", "got", "misconception")
JUDGES = ("hypothesis", "jsonschema", "platformdirs", "pytest", "pytest-xdist", "rich", "typer")


class NotReached(Exception):
    """A source that cannot be had or a method that cannot be judged; the message says why."""


@dataclass(frozen=True)
class Method:
    """One method of a source: what is called, what a reader should know, and why requirements do not hold.

    `chooses` has those that do not hold because the authors state another choice or another method; `fails`
    has all others. `issues` has a text for each of these that can be sent to the authors, or `mended` the
    commit at which the repository has mended it already. `differs` says what differs where the name of the
    requirement does not, and `named` is the name of code that is only related to the method. `shows` names
    the law whose report the page shows, where the shortest report is of something else than the reason.
    """

    called: str
    note: str = ""
    named: str = ""
    fails: dict[str, str] = field(default_factory=dict)
    chooses: dict[str, str] = field(default_factory=dict)
    issues: dict[str, str] = field(default_factory=dict)
    mended: dict[str, str] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    shows: dict[str, str] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, str]:
        return self.fails | self.chooses


@dataclass(frozen=True)
class Source:
    """Public code at one commit, or one version of a package;
    files maps the files that are used to their SHA-256.

    An empty SHA-256 leaves it to git, whose commit names the contents. mlx: it runs with the MLX that
    `make arrays` installs.
    """

    name: str
    title: str
    url: str
    licence: str
    files: dict[str, str]
    methods: dict[str, Method]
    commit: str = ""
    package: str = ""
    mlx: bool = False

    def check(self, folder: Path) -> None:
        """Raise NotReached unless the files in this folder are those that are pinned."""
        for name, wanted in self.files.items():
            path = folder / name
            require(path.is_file(), f"{name}: no such file in {folder}", NotReached)
            got = hashlib.sha256(path.read_bytes()).hexdigest()
            told = f"{name}: got SHA-256 {got}, wanted {wanted}: it is another version of the file"
            require(wanted in ("", got), told, NotReached)


def sources(path: Path = SOURCES) -> list[Source]:
    """What sources.toml lists."""
    return [
        Source(**{**each, "methods": {name: Method(**said) for name, said in each["methods"].items()}})
        for each in tomllib.loads(path.read_text(encoding="utf-8"))["source"]
    ]


def bring(source: Source, given: Path | None = None) -> tuple[Path, Path]:
    """The folder of a source, checked, and the Python that can run it. Raises NotReached."""
    require(not source.mlx or MLX.exists(), "there is no MLX: `make arrays` installs it", NotReached)
    python, folder = Path(sys.executable), given
    if source.package and folder is None:
        python, folder = _with_package()
    elif folder is None:
        folder = FETCHED / source.name
        if not all((folder / name).is_file() for name in source.files):
            _fetch(source, folder)
    source.check(folder)
    return folder, python


def _fetch(source: Source, folder: Path) -> None:
    """A shallow fetch of the commit, without contents, and a checkout of the files that are used, with
    which alone theirs come.
    """
    folder.mkdir(parents=True, exist_ok=True)
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    for command in (
        ["init", "--quiet"],
        ["config", "remote.origin.url", source.url],
        ["fetch", "--quiet", "--depth", "1", "--filter=blob:none", "origin", source.commit],
        ["checkout", "--quiet", "FETCH_HEAD", "--", *source.files],
    ):
        _run(f"git {command[0]}", ["git", "-C", str(folder), *command], quiet, 600)


def _with_package() -> tuple[Path, Path]:
    """kvpress wants another transformers: its environment
    is that of `make peers`, with what the laws need.
    """
    from benchmarks.cpu import environment

    python = environment()
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run("pip install", [*pip, "--constraint", str(ROOT / "requirements" / "tested.txt"), *JUDGES], {}, 900)
    place = "import importlib.util; print(importlib.util.find_spec('kvpress').submodule_search_locations[0])"
    return python, Path(_run("the search for kvpress", [str(python), "-c", place], {}, 60).strip()).parent


def _run(
    what: str, command: list[str], environment: dict[str, str], seconds: float, codes: tuple[int, ...] = (0,)
) -> str:
    """What a command prints. Raises NotReached, naming `what` was to be done and the last that the command
    said, where it ends with another code.
    """
    try:
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=seconds, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotReached(f"{what}: {error}") from error
    why = _why(done.stdout + done.stderr)
    require(done.returncode in codes, f"{what} ended with {done.returncode}: {why}", NotReached)
    return done.stdout


def _why(output: str) -> str:
    """The line of a failed command's output that says why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no word of why"]
    return next((line for line in lines if line.lower().startswith(("fatal:", "error:"))), lines[-1])


def judge(
    source: Source, method: str, folder: Path, python: Path, profile: str, adapters: Path
) -> dict[str, Any]:
    """What the laws of a method say: for each requirement the
    verdict, and the report of what fails. Raises NotReached.
    """
    with tempfile.TemporaryDirectory() as report:
        command = [
            *(str(python), "-m", "evictionary", "judge", str(adapters / source.name)),
            *("--method", method, "--profile", profile, "--report", report),
        ]
        paths = f"{ROOT}{os.pathsep}{MLX}" if source.mlx else str(ROOT)
        environment = {f"WILD_{source.name.upper()}": str(folder), "PYTHONPATH": paths}
        _run(f"{method}: the judge", command, environment, 1800, codes=(0, 1))
        file = Path(report) / "conformance.json"
        require(file.is_file(), f"{method}: the judge wrote no verdict", NotReached)
        verdict = json.loads(file.read_text(encoding="utf-8"))
    found, shows = verdict["implementations"][0]["requirements"], source.methods[method].shows
    return {
        "laws": laws_version(method),
        "requirements": {
            name: _shortened(entry, shows.get(name, ""))
            for name, entry in found.items()
            # A variant among the other methods of the folder is none of this one.
            if entry["verdict"] != "not provided"
            and (entry["verdict"] != "variant" or entry["reason"].startswith(f"{method}."))
            if not name.startswith("MEM-")  # that is the adapter's affair
        },
    }


def _shortened(entry: dict[str, Any], shows: str = "") -> dict[str, Any]:
    """One requirement of conformance.json as it is stored: laws of mathematics and edges, and the report of
    the law `shows`, else the shortest; bad input is put to no adapter.
    """
    laws = [law for law in entry["laws"] if law["kind"] != "refusal"]
    failing = [law for law in laws if law["outcome"] == "fail"]
    mathematics = [law for law in failing if law["kind"] == "mathematics"]
    kinds = {kind: verdict for kind, verdict in entry["kinds"].items() if kind != "refusal"}
    verdict = kinds.get("mathematics") or (entry["verdict"] if not laws else "edges alone")
    reason = entry["reason"]
    if not laws and entry["laws"]:  # refusals alone: all other laws draw inputs that the code does not take
        verdict, reason = "not judged", "the code does not take the inputs of its laws"
    shown = [law for law in mathematics if law["law"].endswith(f"::{shows}")] or mathematics
    first = min(shown, key=lambda law: len(law["message"]), default=None)
    return {
        "verdict": verdict,
        "reason": reason if verdict not in ("pass", "fail") else "",
        "laws": sum(law["kind"] == "mathematics" for law in laws),
        "failing": sorted(law["law"].partition("::")[2] for law in mathematics),
        "edges": sorted(law["law"].partition("::")[2] for law in failing if law["kind"] == "edge"),
        "report": _report(first["message"]) if first else "",
    }


def _report(message: str) -> str:
    """The lines of a failing law's report that SHOWN names, with what is indented below each."""
    kept, taking = [], False
    for line in message.splitlines():
        if line.startswith("  ") and not line.startswith("    "):
            taking = any(line.strip().startswith(label) for label in SHOWN)
        elif not line.startswith(" "):
            taking = False
        if taking:
            kept.append(line[2:].rstrip())
    return "\n".join(kept)


def survey(
    found: list[Source],
    given: dict[str, Path],
    *,
    profile: str,
    adapters: Path = HERE / "adapters",
    say: Callable[[str], None] = lambda line: None,
    keep: Callable[[str, dict[str, Any]], None] = lambda name, row: None,
) -> dict[str, dict[str, Any]]:
    """Judge every method of these sources: by source and method what was found, or why nothing was; `keep`
    gets each at once.
    """
    rows: dict[str, dict[str, Any]] = {}
    for source in found:
        try:
            place: Any = bring(source, given.get(source.name))
        except NotReached as error:
            place = error
        for name in (f"{source.name}/{method}" for method in source.methods):
            try:
                if isinstance(place, NotReached):
                    raise place
                rows[name] = judge(source, name.partition("/")[2], *place, profile, adapters)
            except NotReached as error:
                rows[name] = {"not reached": str(error)}
            say(f"{name}: {told(rows[name])}")
            keep(name, rows[name])
    return rows


def told(row: dict[str, Any]) -> str:
    """A row in words: its requirements by verdict."""
    if "not reached" in row:
        return f"not reached: {row['not reached']}"
    verdicts = grouped((entry["verdict"], name) for name, entry in row["requirements"].items())
    return (
        "; ".join(f"{verdict} {', '.join(names)}" for verdict, names in verdicts.items())
        or "no law could be asked"
    )


def unchecked(found: list[Source], rows: dict[str, dict[str, Any]]) -> list[str]:
    """The failing requirements that no note explains: nobody
    has looked at them yet, and the page does not publish them.
    """
    return [
        f"{source.name}/{method}: {name}"
        for source in found
        for method, said in source.methods.items()
        for name, entry in rows.get(f"{source.name}/{method}", {}).get("requirements", {}).items()
        if entry["verdict"] == "fail" and name not in said.reasons
    ]


def differing(found: list[Source], rows: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many of the rows that were judged have a fail, how
    many only choices that are stated, and how many neither.
    """
    counts = {"fails": 0, "choices": 0, "neither": 0}
    for source in found:
        for method, said in source.methods.items():
            asked = rows.get(f"{source.name}/{method}", {}).get("requirements", {})
            verdicts = {
                "variant" if name in said.chooses else each["verdict"] for name, each in asked.items()
            }
            if asked:
                kind = "fails" if "fail" in verdicts else "choices" if "variant" in verdicts else "neither"
                counts[kind] += 1
    return counts


def when(rows: dict[str, dict[str, Any]]) -> str:
    """The days on which the rows were judged."""
    days = sorted({row["date"] for row in rows.values()}) or ["no day"]
    return f"from {days[0]} to {days[-1]}" if len(days) > 1 else f"on {days[0]}"


def stale(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The rows that were judged by other laws than today's."""
    return [
        name
        for name, row in rows.items()
        if "laws" in row and row["laws"] != laws_version(name.partition("/")[2])
    ]


def page(found: list[Source], stored: dict[str, Any]) -> str:
    """docs/wild.md, from what is stored."""
    return markdown(
        HERE / "wild.md.j2",
        sources=found,
        counts=differing(found, stored["rows"]),
        when=when(stored["rows"]),
        stale=stale(stored["rows"]),
        names=REQUIREMENTS,
        **stored,
    )


def main(
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="This source alone; may be given several times.")
    ] = None,
    folders: Annotated[
        list[str] | None, typer.Option("--from", metavar="NAME=FOLDER", help="A folder that has a source.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="How many inputs a law draws, as of `evictionary judge`.")
    ] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    only_page: Annotated[
        bool, typer.Option("--page", help="Judge nothing, write the page from results.json.")
    ] = False,
) -> None:
    """Judge implementations by others. The exit code is 1 where no note explains why a requirement fails."""
    found = sources()
    names = [source.name for source in found]
    given = {name: Path(os.environ[key]) for name in names if os.environ.get(key := f"WILD_{name.upper()}")}
    for text in folders or ():
        name, _, folder = text.partition("=")
        wanted = f"NAME=FOLDER with one of {', '.join(names)} and a folder that is there"
        is_there = name in names and folder and Path(folder).is_dir()
        require(is_there, f"--from: got {text!r}, wanted {wanted}", typer.BadParameter)
        given[name] = Path(folder).resolve()
    if unknown := sorted(set(only or ()) - set(names)):
        raise typer.BadParameter(f"--only: got {unknown[0]!r}, wanted some of {', '.join(names)}")
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    listed = [f"{source.name}/{method}" for source in found for method in source.methods]

    def keep(name: str, row: dict[str, Any]) -> None:
        """Store a row at once, for a run takes long. What was
        judged before outlasts a source that is not reached now.
        """
        if "not reached" not in row or name not in stored["rows"]:
            stored["rows"][name] = row | {"date": datetime.now(UTC).date().isoformat()}
        stored["rows"] = {each: stored["rows"][each] for each in listed if each in stored["rows"]}
        put(RESULTS, json.dumps(stored, indent=1) + "\n")

    chosen = [source for source in found if not only_page and source.name in (only or names)]
    rows = survey(
        chosen, given, profile=profile, say=functools.partial(print, file=sys.stderr, flush=True), keep=keep
    )
    if as_json and not only_page:
        print(json.dumps(rows, indent=1))
    put(PAGE, page(found, stored))
    lines = unchecked(found, stored["rows"])
    for line in lines:
        print(f"not published, since no note says why it fails: {line}", file=sys.stderr)
    raise typer.Exit(int(bool(lines)))


if __name__ == "__main__":
    typer.run(main)
