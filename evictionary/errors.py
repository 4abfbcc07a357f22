"""What can go wrong, in three kinds; the command line turns the first into exit code 2 and the others into 1."""

from __future__ import annotations


class UsageError(ValueError):
    """An argument has a value that cannot be used: the message names it, what was got and what is wanted."""


class MethodError(RuntimeError):
    """A method's own function raised, or returned something that is no scores and no kept mask."""


class InstallError(RuntimeError):
    """The embedded model could not be downloaded, checked or converted."""
