"""Three kinds of errors; the command line turns UsageError into exit code 2 and the other two into 1."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """An argument has a value that cannot be used: the message names the argument, the value, and the wanted values."""


class MethodError(RuntimeError):
    """A method's own function raised, or returned neither scores nor a kept mask."""


class InstallError(RuntimeError):
    """The embedded model could not be downloaded, checked or converted."""


def require(holds: object, message: str, error: type[Exception] = UsageError) -> None:
    """Raise the error with this message unless something holds."""
    if not holds:
        raise error(message)


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """A known name like the one that was given, as ` (did you mean keydiff?)`; empty where none is close."""
    close = difflib.get_close_matches(got, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
