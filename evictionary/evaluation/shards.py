"""A run on several machines: each measures a shard into a folder of its own, and the shards are joined into
what one machine would have written.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evictionary import __version__, store
from evictionary.errors import require, usage

ABOUT = "shard.json"


class Part(NamedTuple):
    """What the file ABOUT of a folder says: which shard of a run the folder holds, how many measurements the
    shard has, and the command and the settings of the whole run.
    """

    folder: Path
    shard: store.Shard
    measurements: int
    run: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.folder} (shard {self.shard})"


def folder_of(output: Path, shard: store.Shard) -> Path:
    """The folder of a shard, in that of its run."""
    return output / f"{shard.number}-of-{shard.of}"


def measure(plan: store.Plan, output: Path, shard: store.Shard, command: str, **how: Any) -> list[store.Line]:
    """Measure what is missing of a shard, in a folder of `output`, and return every line of it.

    `how` is for `store.run`. Raises UsageError for a folder with a shard of another run.
    """
    folder = folder_of(output, shard)
    settings = json.loads(json.dumps({"command": command, **vars(plan), **plan.common()}, default=list))
    about = {"shard": str(shard), "measurements": len(_keys(plan, shard)), "run": settings}
    if (folder / ABOUT).exists():
        there = _differing(read(folder), Part(folder, shard, 0, settings))
        require(
            not there,
            f"output: {folder} holds a shard of another run (its {there} differ), wanted the options of "
            "before, or another folder",
        )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        store.put(folder / ABOUT, json.dumps(about, indent=1) + "\n")
    return store.run(plan, folder, shard=shard, **how)


def _keys(plan: store.Plan, shard: store.Shard) -> set[str]:
    return {plan.key_of(unit, part) for unit, parts in plan.share(shard) for part in parts}


def read(folder: Path) -> Part:
    """What a folder holds. Raises UsageError for one that holds no shard."""
    wanted = f"parts: got {folder}, wanted a folder that `--shard` wrote, with its {ABOUT}"
    with usage(wanted, OSError, ValueError, TypeError, KeyError):
        said = json.loads((folder / ABOUT).read_text())
        return Part(folder, store.Shard.read(said["shard"]), int(said["measurements"]), dict(said["run"]))


def of_one_run(folders: Sequence[Path]) -> list[Part]:
    """What the folders hold, sorted by shard. Raises UsageError for shards of different runs."""
    parts = sorted(map(read, folders), key=lambda part: part.shard)
    for part in parts[1:]:
        differing = _differing(parts[0], part)
        require(
            not differing,
            f"parts: got {parts[0]} and {part}, whose {differing} differ, wanted shards of one run",
        )
    return parts


def _differing(one: Part, other: Part) -> str:
    """The settings in which two runs differ."""
    both = [{"number of shards": part.shard.of, **part.run} for part in (one, other)]
    names = dict.fromkeys(name for settings in both for name in settings)
    return ", ".join(name for name in names if both[0].get(name) != both[1].get(name))


def join(
    parts: Sequence[Part], kind: type[store.Plan], output: Path, partial: bool = False
) -> tuple[list[store.Line], list[str]]:
    """Write every line of the parts of one run into `output`, as a run of one machine would. Return the
    lines, and what is missing, in words.

    `kind` is the plan of their command. Raises UsageError for a measurement with two results, lines of other
    versions, an `output` that holds other lines, and, unless `partial`, for what is missing.
    """
    folders = dict.fromkeys(part.folder.resolve() for part in parts)
    require(output.resolve() not in folders, f"output: got {output}, a shard, wanted a folder of its own")
    output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for folder in [*folders, output]:
            stack.enter_context(store.alone(folder))
        found = _united(parts, kind)
        lines = {key: line for key, (line, _) in found.items()}
        _require_one_software(found, kind)
        missing = _missing(parts, found)
        require(
            partial or not missing,
            f"parts: got a run without {', '.join(missing)}, wanted all of it: `--shard` measures what a "
            "shard lacks, and `--partial` joins without it",
        )
        require(lines, "parts: got no measurement, wanted at least one")
        others = store.read(output / store.RESULTS, kind.identify).keys() - lines.keys()
        require(
            not others,
            f"output: {output} holds {len(others)} measurements that are in no part, wanted another folder",
        )
        every = sorted(lines.values(), key=kind.order)
        store.write(output / store.RESULTS, every)
    return every, missing


Found = dict[str, tuple[store.Line, Part]]
"""Each line by its identity, with the first part that has it."""


def _united(parts: Sequence[Part], kind: type[store.Plan]) -> Found:
    found: Found = {}
    for part in parts:
        lines = store.read(part.folder / store.RESULTS, kind.identify)
        require(
            len(lines) <= part.measurements,
            f"parts: got {part} with {len(lines)} measurements, wanted no more than its {part.measurements}: "
            "another run wrote into that folder",
        )
        for key, line in lines.items():
            known, other = found.setdefault(key, (line, part))
            require(
                known == line,
                f"parts: got {other} and {part} with different results of {key}, wanted one of the two",
            )
    return found


def _require_one_software(found: Found, kind: type[store.Plan]) -> None:
    """Raise UsageError for lines of different versions, and
    for those of another Evictionary than the one that runs.
    """
    first: dict[str, tuple[Any, Any]] = {}
    for line, part in found.values():
        for name, value in kind.conditions(line).items():
            known, other = first.setdefault(name, (value, part))
            require(
                known == value,
                f"parts: got {other} with {name} {known} and {part} with {name} {value}, wanted one of the "
                "two: measure the older again, into a new folder",
            )
    version, part = first.get("evictionary", (__version__, None))
    require(
        version == __version__,
        f"parts: got {part} of evictionary {version}, wanted {__version__}, which runs here: join with that "
        "version, or measure again",
    )


def _missing(parts: Sequence[Part], found: Found) -> list[str]:
    """What is missing of the run: shards that are not there, and the rest of others."""
    wanted = {part.shard: part.measurements for part in parts}
    have = store.grouped((part.shard, key) for key, (_, part) in found.items())
    of = parts[0].shard.of
    every = [store.Shard(number, of) for number in range(1, of + 1)]
    absent = [str(shard) for shard in every if shard not in wanted]
    rest = [
        f"{wanted[shard] - len(have.get(shard, []))} of {wanted[shard]} measurements of {shard}"
        for shard in every
        if len(have.get(shard, [])) < wanted.get(shard, 0)
    ]
    return absent + rest
