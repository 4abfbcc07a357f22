"""Three kinds of errors; the command line turns UsageError into exit code 2 and the other two into 1."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """An argument has a value that cannot be used: the message
    names the argument, the value, and the wanted values.
    """


class MethodError(RuntimeError):
    """A method's own function raised, or returned neither scores nor a kept mask."""


class InstallError(RuntimeError):
    """The embedded model could not be downloaded, checked or converted."""


def require(holds: object, message: str, error: Callable[[str], BaseException] = UsageError) -> None:
    """Raise the error with this message unless something holds."""
    if not holds:
        raise error(message)


@contextmanager
def usage(message: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise UsageError with this message and the reason where one of these errors is raised inside."""
    try:
        yield
    except errors as error:
        raise UsageError(f"{message}: {getattr(error, 'strerror', None) or error}") from None


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """A known name like the one that was given, as ` (did you mean keydiff?)`; empty where none is close."""
    close = difflib.get_close_matches(got, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def require_known(argument: str, got: str, known: Iterable[str]) -> None:
    """Raise UsageError for a name that is not known: the
    message has the name most like it, then all that are known.
    """
    names = list(known)
    if got not in names:
        raise UsageError(
            f"{argument}: got {got!r}{did_you_mean(got, names)}, wanted one of {', '.join(names)}"
        )
