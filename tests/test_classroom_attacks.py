"""Hostile submissions: each scores nothing, ends in time, and is written down like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from sampling import sampled

from evictionary import reference
from evictionary.classroom import assignment as assignments
from evictionary.classroom import attacks, classes, formats, grading

ORACLE = Path(next(iter(reference.__path__))) / "keydiff.py"


# A sample at every run, all of them in `make test-all`.
SAMPLED = sampled(attacks.SOURCES, every=4)


@pytest.mark.parametrize("name", SAMPLED)
def test_an_attack_scores_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mallory.py"
    path.write_text(attacks.SOURCES[name], encoding="utf-8")
    order = classes.Order("keydiff", b"a secret", 5, tuple(formats.FORMATS), seconds=0.3)
    (grade,) = classes.run(order, {"mallory": path}, tmp_path / "grades", 1)
    assert grade["score"] == 0
    assert grade["error"] == ""
    assert {each.name for each in (tmp_path / "grades" / "mallory").iterdir()} == {
        "grade.json",
        *(file for file, _ in formats.FORMATS.values()),
    }


def test_the_disk_stays_as_it_is() -> None:
    grading.judge(attacks.SOURCES["fills the disk"].encode(), assignments.load("keydiff"), examples=5, explain=False)
    for folder in ("/tmp", "/dev/shm", "/var/tmp"):
        assert not [each for each in Path(folder).glob("full[0-9]*") if each.stat().st_size]


def test_hostile_archives_are_refused(tmp_path: Path) -> None:
    order = classes.Order("keydiff", b"a secret", 5, ())
    for name, path in attacks.archives(tmp_path / "handed_in", ORACLE).items():
        grade = classes.grade_one(order, "mallory", path)
        assert grade["score"] == 0, name
        assert grade["error"], name
        formats.write(grade, tmp_path / "grades", [])
    assert not (tmp_path / "grade.json").exists()


def test_the_oracle_in_the_file_itself_would_have_full_marks() -> None:
    """What the attacks on the oracle are after is worth having: reading it is all that stands between them and full marks."""
    from evictionary.classroom.synthetic import bundled

    result = grading.judge(bundled("keydiff").encode(), assignments.load("keydiff"), secret=b"a secret", examples=1)
    assert result.score == 100
