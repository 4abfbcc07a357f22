"""What no rewriting may lose: laws, planted mistakes and what kills them, right variants, requirements,
files of the wheel.

`python -m tests.goldens` compares the tree with `goldens.json.xz` and says what differs; `--write` stores the
tree as it is. A commit that changes the goldens says why.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from evictionary.spec_tests.judge.law import REQUIREMENTS, load_laws
from evictionary.spec_tests.proof import asking
from evictionary.spec_tests.proof.matrix import rows
from evictionary.spec_tests.proof.planted import load_controls, load_mutants

ROOT = Path(__file__).resolve().parents[2]
STORED = Path(__file__).with_name("goldens.json.xz")


def laws() -> dict[str, str]:
    """Each law's requirement, class and functions, by the law's name."""
    return {
        name.split("::")[1]
        + f" ({law.requirement.id})": f"{law.kind}: {', '.join(law.functions) or 'the paper'}"
        for name, law in load_laws().items()
    }


def mistakes() -> dict[str, str]:
    return {
        name: f"{each.of} dies by {each.killed_by}: {each.misconception}"
        for name, each in load_mutants().items()
    }


def kills() -> dict[str, str]:
    """The laws that kill each mistake, as docs/kill_matrix.json.xz has them."""
    return {
        name: ", ".join(law for law, word in sorted(outcomes.items()) if word == "killed")
        for name, outcomes in rows().items()
    }


def wheel() -> dict[str, str]:
    # files that are gone from the tree would stay in the wheel
    shutil.rmtree(ROOT / "build/lib", ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)]
        subprocess.run(command, check=True, capture_output=True)
        (built,) = Path(folder).glob("*.whl")
        return {name: "" for name in zipfile.ZipFile(built).namelist() if "dist-info" not in name}


def verdicts() -> dict[str, str]:
    """What `evictionary judge` says of each requirement for the two implementations of this project."""
    found = {}
    for name in ("reference", "optimized"):
        command = [
            sys.executable,
            "-m",
            "evictionary",
            "judge",
            name,
            "--profile",
            "quick",
            "--json",
            "--strict",
        ]
        content = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout)
        for identifier, entry in content["implementations"][0]["requirements"].items():
            found[f"{name} {identifier}"] = ", ".join(
                f"{kind} {word}" for kind, word in entry["kinds"].items()
            )
    return found


PARTS = {
    "laws": laws,
    "mistakes": mistakes,
    "kills": kills,
    "variants": lambda: {name: each.of for name, each in load_controls().items()},
    "requirements": lambda: {name: each.statement for name, each in REQUIREMENTS.items()},
    "wheel": wheel,
    "verdicts": verdicts,
}


def stored() -> dict[str, dict[str, str]]:
    return asking.stored(STORED)


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """One line for each name that is gone, new, or says something else."""
    return [
        *(f"gone: {name}" for name in before if name not in after),
        *(f"new: {name}" for name in after if name not in before),
        *(
            f"{name}: was {each}, is {after[name]}"
            for name, each in before.items()
            if after.get(name, each) != each
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the parts as they are now")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which parts (default: all)")
    arguments = parser.parse_args()
    found = {part: PARTS[part]() for part in arguments.parts or PARTS}
    lines = [f"{part}: {line}" for part in found for line in differences(stored().get(part, {}), found[part])]
    print("\n".join([*lines, f"{len(lines)} differences"]))
    if arguments.write:
        asking.store(STORED, stored() | found)
    elif lines:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
