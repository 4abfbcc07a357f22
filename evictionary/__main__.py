"""`python -m evictionary` is the command `evictionary`."""

from evictionary.cli.app import app

app()
