"""Runs methods on tasks, in parallel if wanted, and keeps every finished measurement.

One unit of work is a prompt: a task, a length and a seed. The model reads the prompt's text once; every method at every setting
then compresses a copy of the same cache. Each measurement is one line of `results.jsonl`. The file grows only by whole lines, so a
run that was killed goes on where it stopped. `share` does this for other measurements too, such as those of the papers' claims.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import joblib
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from evictionary import __version__
from evictionary.cache.arguments import checked
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cache.layers import EvictingLayer
from evictionary.cache.model_hooks import require_prompt
from evictionary.errors import MethodError, UsageError
from evictionary.evaluation import tasks
from evictionary.evaluation.questions import Answer, ask, likelihood, prefill
from evictionary.methods.catalogue import RANDOM
from evictionary.methods.method import Method, Request, tokens_to_keep
from evictionary.methods.resolve import resolve
from evictionary.models import embedded
from evictionary.models.load import EMBEDDED
from evictionary.models.load import load as load_model

FULL = "full"
"""The name of the baseline that removes nothing."""

RESULTS = "results.jsonl"
LOCK = ".lock"

SCORED = ("exact", "partial", "tokens_kept", "bytes_before", "bytes_after", "seconds", "source", "versions")
"""The fields of a successful measurement's line, beside those that identify it."""

Line = dict[str, Any]
"""One measurement. Its identity: model, task, length, seed, method, options, ratio, budget. Its results: exact, partial,
answer, expected, perplexity (of a text that goes on; then answer is None), tokens (of the context), tokens_kept, bytes_before,
bytes_after, seconds (to compress, ask and answer), error (None, or why the method failed; then there are no scores). Also source, a
digest of a user's own file, and the versions."""

LinesOf = Callable[[str, Any, Sequence[Any]], Iterator[Line]]
"""Measures, with the model of a name, what is wanted on one unit of work."""


@dataclass(frozen=True)
class Setting:
    """A method with its options, and either the fraction to remove or the tokens to keep in each head."""

    method: str
    options: dict[str, Any] = field(hash=False, default_factory=dict)
    ratio: float | None = None
    budget: int | None = None

    @property
    def source(self) -> str | None:
        """A digest of the user's files that the method names: an edited file is measured again."""
        files = re.findall(r"[^+:]+\.py\b", self.method)
        contents = b"".join(Path(file).read_bytes() for file in files)
        return hashlib.sha256(contents).hexdigest()[:12] if files else None


class Unit(NamedTuple):
    """One prompt."""

    task: str
    length: int
    seed: int


@dataclass(frozen=True)
class Plan:
    """Everything to measure: each method at each ratio and each budget, and the two baselines, on each prompt.

    `methods` are pairs of a name and options; lengths are in tokens, of context and question together.
    Raises UsageError for an unknown name, a value out of range or an empty list.
    """

    model: str
    methods: Sequence[tuple[str, Mapping[str, Any]]]
    tasks: Sequence[str]
    lengths: Sequence[int]
    seeds: Sequence[int]
    ratios: Sequence[float] = ()
    budgets: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("methods", "tasks", "lengths", "seeds"):
            if not getattr(self, name):
                raise UsageError(f"{name}: got none, wanted at least one")
        if not self.ratios and not self.budgets:
            raise UsageError("ratios: got none and no budgets, wanted at least one")
        for name in self.tasks:
            tasks.get(name)
        for length in self.lengths:
            if length < 1:
                raise UsageError(f"lengths: got {length}, wanted at least 1")
        for ratio in self.ratios:
            tokens_to_keep(1, ratio)
        for budget in self.budgets:
            tokens_to_keep(1, 0.0, budget)

    def settings(self) -> list[Setting]:
        """The full cache, then each method and random eviction at each ratio and budget, without repetitions."""
        found = [Setting(FULL, ratio=0.0)]
        for name, options in [*self.methods, (RANDOM, {})]:
            typed = checked(name, 0.0, options, None, 0)[1]
            for ratio in self.ratios:
                found.append(Setting(name, typed, ratio=float(ratio)))
            for budget in self.budgets:
                found.append(Setting(name, typed, budget=budget))
        return [setting for index, setting in enumerate(found) if setting not in found[:index]]

    def units(self) -> list[Unit]:
        """Every prompt once."""
        every = [Unit(task, length, seed) for task in self.tasks for length in self.lengths for seed in self.seeds]
        return list(dict.fromkeys(every))


class Measurement(NamedTuple):
    """The result of one setting on one prompt: its line without the model and the unit, the answer, and the cache.

    The answer is None if the method failed, or if the text goes on without a question.
    """

    line: Line
    answer: Answer | None
    cache: EvictingCache | None


class Progress(NamedTuple):
    """Measurements done and planned in this run, a description of the last one, and the estimated seconds left."""

    done: int
    total: int
    text: str
    seconds_left: float


def run(
    plan: Plan, folder: Path, *, jobs: int = 1, dask: str | None = None, advance: Callable[[Progress], None] = lambda progress: None
) -> list[Line]:
    """Run the measurements that `folder / results.jsonl` lacks, and return every line of that file, sorted.

    `jobs` processes share the prompts; `dask`, a scheduler's address, or "local" for a cluster of `jobs` workers on this machine,
    sends them to Dask workers instead. One process stores each measurement at once; several processes store each prompt at once.
    Measurements that failed before are tried again, and so are the measurements of a method whose file has changed.
    Raises UsageError for an unusable folder, length or cluster, or a folder with the results of another model.
    """

    def missing(found: Mapping[str, Line]) -> list[tuple[Unit, list[Setting]]]:
        work = _missing(plan, found)
        _require_lengths(plan.model, [unit for unit, _ in work])
        return work

    def text(line: Line) -> str:
        return f"{line['task']}, {line['length']} tokens, seed {line['seed']}: {label(line)}"

    return share(
        folder, plan.model, missing, _lines, identify=_identify, text=text, order=_order, jobs=jobs, dask=dask, advance=advance
    )


def share(
    folder: Path,
    model: str,
    missing: Callable[[Mapping[str, Line]], Sequence[tuple[Any, Sequence[Any]]]],
    lines_of: LinesOf,
    *,
    identify: Callable[[Line], str],
    text: Callable[[Line], str],
    order: Callable[[Line], Any],
    jobs: int = 1,
    dask: str | None = None,
    advance: Callable[[Progress], None] = lambda progress: None,
) -> list[Line]:
    """Measure what `folder / results.jsonl` lacks, as `run` describes, and return every line of the file, sorted by `order`.

    `missing` gets the lines that are there, by their identity, and returns the units of work, each with what is to be measured on
    it. `lines_of`, a function of a module, gets the model's name, a unit and that, and yields one line for each; `text` describes
    a line for `advance`. Raises UsageError as `run` does.
    """
    if jobs < 1:
        raise UsageError(f"jobs: got {jobs}, wanted at least 1")
    path = folder / RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        found = read(path, identify)
        others = {line["model"] for line in found.values()} - {model}
        if others:
            raise UsageError(f"output: {folder} holds the results of {', '.join(sorted(others))}, wanted a folder for {model}")
        work = missing(found)
        total = sum(len(each) for _, each in work)
        start, done = time.perf_counter(), 0
        for lines in _measured(lines_of, model, work, jobs, dask):
            for line in lines:
                append(path, line)
                found[identify(line)] = line
            done += len(lines)
            advance(Progress(done, total, text(lines[-1]), (time.perf_counter() - start) / done * (total - done)))
        every = sorted(found.values(), key=order)
        rewrite(path, every)
    return every


def label(line: Mapping[str, Any]) -> str:
    """'lagkv (lag_size=128)', for a line or any dictionary with method and options."""
    options = ", ".join(f"{name}={value}" for name, value in line["options"].items())
    return f"{line['method']} ({options})" if options else line["method"]


def identity(line: Mapping[str, Any]) -> str:
    """The identity of a measurement, as JSON."""
    names = ("model", "task", "length", "seed", "method", "options", "ratio", "budget")
    return json.dumps([line[name] for name in names], sort_keys=True)


def _identify(line: Mapping[str, Any]) -> str:
    """The identity of a line. Raises KeyError or ValueError if the line lacks a field of a successful measurement."""
    if line["error"] is None and any(line[name] is None for name in SCORED if name != "source"):
        raise ValueError("a score is missing")
    return identity(line)


def read(path: Path, identify: Callable[[Line], str] = _identify) -> dict[str, Line]:
    """The lines of a results file by their identity; of several lines with one identity, the last.

    An incomplete last line, from a write that was cut off, is removed from the file. Raises UsageError for any other line that is
    no measurement.
    """
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data.rpartition(b"\n")
    if whole[2]:
        os.truncate(path, len(data) - len(whole[2]))
    found = {}
    for number, text in enumerate(whole[0].splitlines(), start=1):
        try:
            line = json.loads(text)
            found[identify(line)] = line
        except (ValueError, TypeError, KeyError):
            raise UsageError(
                f"output: line {number} of {path} is no measurement; wanted a file that this command wrote: delete that line, and "
                "what it said is measured again"
            ) from None
    return found


def append(path: Path, line: Line) -> None:
    """Append one line in one write, and return when it is on the disk."""
    data = (json.dumps(line) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(f"{path}: a line could not be written whole; is the disk full?")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rewrite(path: Path, lines: Sequence[Line]) -> None:
    """Replace the file by these sorted lines, completely or not at all: the order does not depend on which process was faster."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def measure(model: Any, tokenizer: Any, prompt: tasks.Prompt, settings: Sequence[Setting], seed: int) -> Iterator[Measurement]:
    """Read one prompt, then compress a copy of its cache by each setting and ask it. `seed` is for methods that draw."""
    chosen = {setting.method: resolve(setting.method) for setting in settings if setting.method != FULL}
    record = frozenset().union(*(method.captured for method in chosen.values()))
    full = EvictingCache(model, method=None, record=record)
    prefill(model, prompt.context_ids, full)
    for setting in settings:
        line: Line = {
            "method": setting.method,
            "options": setting.options,
            "ratio": setting.ratio,
            "budget": setting.budget,
            "source": setting.source,
            "expected": list(prompt.answers),
            "tokens": prompt.context_ids.shape[1],
        }
        answer, cache, start = None, None, time.perf_counter()
        try:
            method = chosen.get(setting.method)
            arguments = (method, setting.ratio or 0.0, setting.options, setting.budget)
            cache = full if method is None else _compressed(model, full, arguments, prompt.every, seed)
            found = {"tokens_kept": cache.tokens_kept, "bytes_before": full.nbytes, "bytes_after": cache.nbytes}
            with cache:
                if method is not None:
                    _require_shrunk(cache, method, Request(setting.ratio or 0.0, setting.budget, setting.options))
                if prompt.continuation is None:
                    answer = ask(model, tokenizer, cache, prompt.question_ids, prompt.max_new_tokens)
                    scores = {**prompt.score(answer.text)._asdict(), "answer": answer.text}
                else:
                    scores = _foretold(model, cache, prompt, prompt.continuation)
            line |= {**found, **scores, "error": None}
        except MethodError as error:
            line["error"] = str(error)
        yield Measurement(line | {"seconds": time.perf_counter() - start, "versions": versions()}, answer, cache)


def _compressed(model: Any, full: EvictingCache, arguments: Any, every: int, seed: int) -> EvictingCache:
    """A compressed copy that compresses again while decoding, if its method can; one that cannot compresses the prompt alone.

    So does a recursive method: again and again it keeps what each partition says, and not the amount that was asked for.
    """
    again = 0 if "recursive" in arguments[0].traits else every
    try:
        return EvictingCache.from_prefilled(model, full, *arguments, every=again, seed=seed)
    except UsageError:
        return EvictingCache.from_prefilled(model, full, *arguments, every=0, seed=seed)


def _foretold(model: Any, cache: EvictingCache, prompt: tasks.Prompt, continuation: torch.Tensor) -> dict[str, Any]:
    """exact: whether each token of the continuation is the likeliest one; partial: the share of those that are; the perplexity."""
    found = likelihood(model, cache, prompt.question_ids, continuation, block_size=1 if prompt.every else None)
    right = sum(found.is_likeliest) / len(found.is_likeliest)
    return {"exact": float(right == 1), "partial": right, "perplexity": math.exp(found.loss), "answer": None}


def _require_shrunk(cache: EvictingCache, method: Method, request: Request) -> None:
    """Raise MethodError for a cache with more tokens than asked for: its score would stand beside those of smaller caches."""
    length = cache.get_seq_length()
    layers = [index for index, layer in enumerate(cache.layers) if isinstance(layer, EvictingLayer)]
    each = [method.most(length, replace(request, layer_index=index, num_layers=len(cache.layers))) for index in layers]
    asked = sum(each) / len(each)
    if cache.tokens_kept > asked + 1e-6:
        raise MethodError(
            f"{method.name}: the cache stores {cache.tokens_kept:.5g} of {length} tokens in each head, where {asked:.5g} were "
            'asked for; a method that decides by itself how many stay says TRAITS = {"own_budget"}'
        )


def versions() -> dict[str, str]:
    """The software versions that can change a result."""
    return {
        "evictionary": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


_one_at_a_time = threading.Lock()
"""A Dask worker may run several threads, but they would share one model and its attention."""


def _whole_unit(lines_of: LinesOf, model_name: str, unit: Any, wanted: Sequence[Any]) -> list[Line]:
    _end_with_parent()
    # a method's own prints in a worker must not reach the standard output of the command, which may be JSON
    with _one_at_a_time, contextlib.redirect_stdout(sys.stderr):
        return list(lines_of(model_name, unit, wanted))


@cache
def _end_with_parent() -> None:
    """End this worker soon after the process that started it, even after SIGKILL: each worker holds a model."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _lines(model_name: str, unit: Unit, settings: Sequence[Setting]) -> Iterator[Line]:
    """The line of each setting on the prompt of a unit."""
    model, tokenizer = loaded(model_name)
    prompt = tasks.get(unit.task).make(tokenizer, unit.length, unit.seed)
    for measured in measure(model, tokenizer, prompt, settings, unit.seed):
        yield {"model": model_name, **unit._asdict(), **measured.line}


@cache
def loaded(model_name: str) -> tuple[Any, Any]:
    """The model and the tokenizer, loaded once in each process."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # a worker's progress bar would mix with ours
    return load_model(model_name)


def _measured(
    lines_of: LinesOf, model_name: str, work: Sequence[tuple[Any, Sequence[Any]]], jobs: int, dask: str | None
) -> Iterator[Sequence[Line]]:
    """The lines as they come: each by itself from this process, those of a whole unit from another one."""
    if not work:
        return
    if jobs == 1 and dask is None:
        for unit, wanted in work:
            yield from ([line] for line in lines_of(model_name, unit, wanted))
        return
    with _workers(jobs, dask):
        parallel = joblib.Parallel(return_as="generator_unordered", batch_size=1)
        calls = (joblib.delayed(_whole_unit)(lines_of, model_name, unit, wanted) for unit, wanted in work)
        try:
            yield from parallel(calls)
        except BrokenProcessPool as error:
            raise OSError(
                "a worker process died, perhaps for lack of memory: the same command goes on, with fewer --jobs"
            ) from error


@contextlib.contextmanager
def _workers(jobs: int, dask: str | None) -> Iterator[None]:
    """Let joblib use processes of this machine, or the workers of a Dask cluster, while the context lasts."""
    with contextlib.ExitStack() as stack:
        if dask is None:
            stack.enter_context(joblib.parallel_config(backend="loky", n_jobs=jobs))
        else:
            stack.enter_context(joblib.parallel_config(backend="dask", client=_client(jobs, dask, stack)))
        yield


def _client(jobs: int, dask: str, stack: contextlib.ExitStack) -> Any:
    """A client of the cluster; `stack` closes it."""
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise UsageError(
            f"dask: got {dask!r} but Dask is not installed, wanted it, from a clone: pip install 'path/to/the/clone[cluster]'"
        ) from None
    if dask == "local":
        cluster = stack.enter_context(LocalCluster(n_workers=jobs, threads_per_worker=1, dashboard_address=None))
        return stack.enter_context(Client(cluster))
    try:
        return stack.enter_context(Client(dask, timeout=10))
    except (OSError, ValueError) as error:
        raise UsageError(f"dask: got {dask!r}, wanted 'local' or the address of a scheduler that answers: {error}") from None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder: two runs that write into one folder would measure everything twice. A killed run leaves no lock behind."""
    try:
        with filelock.FileLock(folder / LOCK, timeout=0):
            yield
    except filelock.Timeout:
        raise UsageError(f"output: {folder} is being written by another run, wanted another folder") from None


def _missing(plan: Plan, found: Mapping[str, Line]) -> list[tuple[Unit, list[Setting]]]:
    """The unfinished units, each with its missing settings."""
    settings = [(setting, setting.source) for setting in plan.settings()]
    work = []
    for unit in plan.units():
        lacking = []
        for setting, source in settings:
            key = identity({"model": plan.model, **unit._asdict(), **vars(setting)})
            line = found.get(key)
            if line is None or line["error"] is not None or line["source"] != source:
                lacking.append(setting)
        if lacking:
            work.append((unit, lacking))
    return work


def _require_lengths(model_name: str, units: Sequence[Unit]) -> None:
    """Raise UsageError, before hours of work, for a length that is too short for a task or too long for the model."""
    if not units:
        return
    folder = str(embedded.install()) if model_name == EMBEDDED else model_name
    try:
        tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError):
        return  # loading the model will say what is wrong with it
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    for unit in {(unit.task, unit.length): unit for unit in units}.values():
        prompt = tasks.get(unit.task).make(tokenizer, unit.length, unit.seed)
        require_prompt(prompt.context_ids.shape[1] + prompt.question_ids.shape[1] + prompt.max_new_tokens, longest)


def _order(line: Line) -> tuple[Any, ...]:
    amount = (line["ratio"] is None, line["budget"] if line["ratio"] is None else line["ratio"])
    return line["task"], line["length"], line["seed"], line["method"], json.dumps(line["options"], sort_keys=True), amount
