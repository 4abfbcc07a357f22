"""Writes the points of a gradebook.csv into the database of an nbgrader course.

    python to_nbgrader.py grades/keydiff/gradebook.csv keydiff sqlite:///gradebook.db

nbgrader gives points to cells of notebooks. So the assignment gets one notebook with one cell, and its points
are set by hand, as a grader does. `nbgrader export` and the formgrader show them then.
"""

import csv
import sys
from pathlib import Path

from nbgrader.api import Gradebook

CELL = "evictionary"


def write(table: Path, assignment: str, database: str) -> int:
    """Write every line of the table; returns how many there are. A second run sets the points anew."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with Gradebook(database) as book:
        book.update_or_create_assignment(assignment)
        book.update_or_create_notebook(assignment, assignment)
        most = max(float(row["of"]) for row in rows)
        book.update_or_create_grade_cell(CELL, assignment, assignment, max_score=most, cell_type="code")
        for row in rows:
            book.update_or_create_student(row["id"])
            book.update_or_create_submission(assignment, row["id"])
            grade = book.find_grade(CELL, assignment, assignment, row["id"])
            grade.manual_score, grade.needs_manual_grade = float(row["points"]), False
        book.db.commit()
    return len(rows)


if __name__ == "__main__":
    count = write(Path(sys.argv[1]), *sys.argv[2:4])
    print(f"{count} students have their points in {sys.argv[3]}")
