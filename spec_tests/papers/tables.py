"""The tables that the papers print: CSV files beside this one, with the numbers as they are printed."""

import csv
import functools
from pathlib import Path


@functools.cache
def printed(name: str) -> list[dict[str, str]]:
    """The rows of `name`.csv, each the texts of its cells by the names of their columns."""
    with Path(__file__).with_name(f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
