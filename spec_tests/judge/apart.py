"""The process of `pytest` or of `evictionary judge` imports
nothing that is judged: a process of its own describes it.

So a verdict is told whatever an implementation does to its process. Workers of pytest-xdist ask the laws,
under a `watch`.
"""

import os
import pickle
import struct
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from evictionary.spec_tests.judge.implementation import UnusableImplementation, load_each
from evictionary.spec_tests.judge.remote import Gone, Remote

LENGTH = struct.Struct(">Q")
"""Of an answer, before it."""

IMPORT_SECONDS = 120.0
"""The least time that an import may take: that of torch takes long from a cold disk."""


def described(target: str, *arguments: Any, **options: Any) -> list[Any]:
    """What `load_each` finds, from a process of its own:
    without its code, of which there are only the names.

    Raises UnusableImplementation as `load_each` does, and
    where importing the implementation ends the process.
    """
    command = [sys.executable, "-P", "-m", __name__]
    seconds = max(IMPORT_SECONDS, options.get("seconds", 0))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with closing(
        Remote(f"{target}: the process that imports it", command, seconds, env=environment)
    ) as process:
        try:
            with process.asking():
                process.send(pickle.dumps((target, arguments, options)))
                found = pickle.loads(process.receive(*LENGTH.unpack(process.receive(LENGTH.size))))
        except Gone as gone:
            raise UnusableImplementation(str(gone)) from None
    if isinstance(found, Exception):
        raise found
    return found


def _outline(implementation: Any) -> Any:
    """An implementation as another process can read it: the names of its functions, and not their code."""
    names = {
        stem: SimpleNamespace(**{name: len for name, value in vars(module).items() if callable(value)})
        for stem, module in implementation.modules.items()
    }
    return replace(implementation, modules=names)


def main() -> None:
    """Describe an implementation; what its import prints goes to the standard error."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    target, arguments, options = pickle.load(sys.stdin.buffer)
    found: Any
    try:
        found = [_outline(each) for each in load_each(target, *arguments, **options)]
    except UnusableImplementation as error:
        found = error
    told = pickle.dumps(found)
    answer.write(LENGTH.pack(len(told)) + told)
    answer.flush()
    os._exit(0)  # threads that the import has started go on for ever


if __name__ == "__main__":
    main()
