"""What a person reads: the sentence of a failing law, with its smallest input and a repro, and the verdict by requirement."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import pytest

from spec_tests.implementation import Implementation
from spec_tests.law import REQUIREMENTS, Law
from spec_tests.tolerance import Violation

JUDGED = pytest.StashKey[list[Implementation]]()
# The column of the laws that are about a paper, not about an implementation.
PAPER = "the papers themselves"
NOT_PROVIDED = pytest.StashKey[list[tuple[Law, Implementation, str]]]()


def sentence(law: Law, implementation: Implementation, error: BaseException) -> str:
    """Say what does not hold, for which input, and how to see it again."""
    requirement = law.requirement
    lines = [
        f"{requirement.id} does not hold for {' and '.join(law.functions)} of {implementation}",
        f"  the law         {law.sentence}",
        f"  the equation    {requirement.statement} ({requirement.source})",
    ]
    calls = implementation.calls
    if calls:
        lines.append("  smallest input  " + _indented(_arguments(calls[-1].arguments)))
    if isinstance(error, Violation):
        lines.append(f"  what is wrong   {error.message}")
        if error.expected is not None:
            lines.append("  expected        " + _indented(_show(error.expected)))
        if error.got is not None:
            lines.append("  got             " + _indented(_show(error.got)))
    else:
        lines.append(f"  what is wrong   {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines.append(f"  raised in       {frame.filename}:{frame.lineno}, {frame.name}: {frame.line}")
    if calls:
        lines += [
            "  to see it again, run",
            *(f"    {line}" for line in repro(implementation, calls[-1].function).splitlines()),
        ]
    lines.append(f"  this law alone  pytest {law.name.replace('::', '.py::', 1)} --impl {implementation.name}")
    return "\n".join(lines)


def repro(implementation: Implementation, path: str) -> str:
    """A program that makes the last recorded call of `path` again and prints it beside the reference."""
    call = implementation.calls[-1]
    stem, name = path.split(".")
    arguments = ", ".join(f"{key}={key}" for key in call.arguments)
    return "\n".join(
        [
            "import numpy as np",
            "from spec_tests.implementation import load, oracle",
            *(f"{key} = {_literal(value)}" for key, value in call.arguments.items()),
            f'impl = load("{implementation.origin}", device="{implementation.device}", dtype="{implementation.dtype}")',
            f'print("expected", oracle("{path}")({arguments}))',
            f'print("got     ", impl.{stem}.{name}({arguments}))',
        ]
    )


def _literal(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        home = type(value)
        fields = ", ".join(f"{key}={_literal(entry)}" for key, entry in zip(value._fields, value, strict=True))
        return f"__import__('importlib').import_module('{home.__module__}').{home.__name__}({fields})"
    if isinstance(value, np.ndarray):
        dtype = "" if value.dtype == np.float64 else f", dtype=np.{value.dtype.name}"
        return f"np.array({value.tolist()}{dtype}).reshape({value.shape})"
    return repr(value)


def _arguments(arguments: dict[str, Any]) -> str:
    return "\n".join(f"{name} = {_show(value)}" for name, value in arguments.items())


def _show(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "\n".join(f"{name} = {_show(entry)}" for name, entry in zip(value._fields, value, strict=True))
    if isinstance(value, np.ndarray):
        with np.printoptions(precision=9, suppress=True, threshold=60, edgeitems=3, linewidth=110):
            return f"{value!s}" + (f"   shape {value.shape}" if value.size > 1 else "")
    return str(value)


def _indented(text: str) -> str:
    return text.replace("\n", "\n" + " " * 18)


def write_verdict(terminal: Any, config: pytest.Config) -> None:
    """Write one row for each requirement and one column for each implementation."""
    outcomes: dict[tuple[str, str], list[str]] = {}
    for outcome in ("passed", "failed", "error"):
        for result in terminal.stats.get(outcome, []):
            law = dict(getattr(result, "user_properties", [])).get("law")
            if law is not None and (result.when == "call" or result.failed):
                outcomes.setdefault(tuple(law), []).append(outcome)
    reasons = {(law.requirement.id, str(implementation)): why for law, implementation, why in config.stash.get(NOT_PROVIDED, [])}
    if not outcomes and not reasons:
        return
    judged = [str(implementation) for implementation in config.stash[JUDGED]]
    if any(name == PAPER for _, name in outcomes):
        judged.append(PAPER)
    terminal.section("verdict by requirement")
    for name in judged:
        terminal.write_line(name)
        for identifier in REQUIREMENTS:
            found = outcomes.get((identifier, name))
            if found is not None:
                bad = len(found) - found.count("passed")
                word = f"fail ({bad} of {len(found)} laws)" if bad else f"pass ({len(found)} laws)"
                terminal.write_line(f"  {identifier:9}{word}", red=bool(bad), green=not bad)
            elif (identifier, name) in reasons:
                terminal.write_line(f"  {identifier:9}not provided: {reasons[identifier, name]}", yellow=True)
