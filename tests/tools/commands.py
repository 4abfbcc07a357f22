"""What the tests of the commands share: to call one, and to read what it prints."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from evictionary.cli.app import app


def invoke(*arguments: object) -> Result:
    """The result of a command, whatever its exit code."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(*arguments: object) -> str:
    """What a command that succeeds prints on standard output."""
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def as_json(*arguments: object) -> Any:
    """The JSON of a command that succeeds: nothing else may stand on its standard output."""
    return json.loads(printed(*arguments, "--json"))


def failed(*arguments: object, code: int) -> str:
    """What a command that exits with this code says on standard error, its line breaks as spaces."""
    done = invoke(*arguments)
    assert done.exit_code == code, done.output
    return " ".join(done.stderr.split())
