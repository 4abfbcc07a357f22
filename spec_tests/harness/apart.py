"""The process of `pytest` or of `evictionary judge` imports nothing that is judged: a process of its own describes it.

So a verdict is told whatever an implementation does to its process. Workers of pytest-xdist ask the laws, under a `watch`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evictionary.spec_tests.harness.implementation import UnusableImplementation, load_each
from evictionary.spec_tests.harness.watch import ended, text_of

IMPORT_SECONDS = 120.0
"""The least time that an import may take: that of torch takes long from a cold disk."""


def described(target: str, *arguments: Any, **options: Any) -> list[Any]:
    """What `load_each` finds, from a process of its own: without its code, of which there are only the names.

    Raises UnusableImplementation as `load_each` does, and where importing the implementation ends the process.
    """
    with tempfile.TemporaryDirectory(prefix="evictionary-") as folder:
        asked, answer, said = (Path(folder) / name for name in ("asked", "answer", "said"))
        asked.write_bytes(pickle.dumps((target, arguments, options)))
        command = [sys.executable, "-P", "-m", __name__, folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with said.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            seconds = max(IMPORT_SECONDS, options.get("seconds", 0))
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise UnusableImplementation(f"{target}: importing it did not end within {seconds:g} s") from None
        if not answer.exists():
            words = text_of(said).strip().splitlines()[-1:]
            raise UnusableImplementation(
                f"{target}: importing it ended the process: {ended(code)}{'; its last words: ' * bool(words)}{''.join(words)}"
            )
        found = pickle.loads(answer.read_bytes())
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
    """Describe an implementation: the first argument is the folder that `described` has made."""
    folder = Path(sys.argv[1])
    target, arguments, options = pickle.loads((folder / "asked").read_bytes())
    found: Any
    try:
        found = [_outline(each) for each in load_each(target, *arguments, **options)]
    except UnusableImplementation as error:
        found = error
    (folder / "answer").write_bytes(pickle.dumps(found))
    os._exit(0)  # threads that the import has started go on for ever


if __name__ == "__main__":
    main()
