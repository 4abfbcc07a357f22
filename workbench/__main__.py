"""`python -m workbench` is the command `evictionary`."""

from workbench.cli import app

app()
