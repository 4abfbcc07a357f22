"""What the tests share: no test, and no part of what is installed."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
