"""The open assignment: a student's scorer in the embedded model, beside LagKV, under one budget.

The model runs in the parent. The scorer runs in a child process and is sent the keys and values of one layer
at a time.
"""

import ast
import math
import random
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.classroom.child import Child, StudentError
from evictionary.classroom.judgement import Judgement, Run
from evictionary.errors import require
from evictionary.evaluation import passkey, tasks
from evictionary.evaluation.questions import Answer, ask, prefill
from evictionary.methods.catalogue import INPUTS
from evictionary.methods.resolve import resolve
from evictionary.models.load import load
from evictionary.spec_tests.judge.remote import Gone

RATIO = 0.75
LAG = {"lag_size": 128}
GIVEN = ("keys", "values")  # to a scorer
NEAR = 1.05  # times LagKV's distance: over five texts the mean is uncertain by a few percent
load_model = cache(load)  # the embedded one, once in a process


class Measured(NamedTuple):
    """Whether an answer is right, and how far the final
    state is from the full cache's, relative to its length.
    """

    is_right: bool
    error: float


@dataclass
class Text:
    """One text, and what the model makes of it: the full cache with its answer, and the results of LagKV.

    Both are computed when they are asked for, and once for all submissions that a process grades.
    """

    prompt: passkey.Passkey

    @cached_property
    def full(self) -> tuple[EvictingCache, Answer]:
        model, tokenizer = load_model()
        cache = EvictingCache(model, method=None)
        prefill(model, self.prompt.context_ids, cache)
        return cache, ask(model, tokenizer, cache, self.prompt.question_ids, 12)

    @cached_property
    def lagkv(self) -> Measured:
        return run_method("lagkv", self, LAG)


@cache
def texts(seed: int) -> list[Text]:
    """Five texts, of a check as of a grade, with random places
    of the number: what `check` says holds for a grade too.
    """
    _, tokenizer = load_model()
    draw, found = random.Random(seed), []
    for low in (0, 0.2, 0.4, 0.6, 0.8):
        depth = round(draw.uniform(low, low + 0.2), 3)
        found.append(Text(passkey.make(tokenizer, depth=depth, seed=seed % 2**31, tokens=1200)))
    return found


def run_method(method: Any, text: Text, options: dict[str, Any] | None = None) -> Measured:
    """Compress the cache of a text by a method, and ask for the number."""
    model, tokenizer = load_model()
    full, by_full = text.full
    compressed = EvictingCache.from_prefilled(model, full, method, RATIO, options)
    answer = ask(model, tokenizer, compressed, text.prompt.question_ids, 12)
    whole = by_full.hidden_states.double()
    error = torch.linalg.norm(whole - answer.hidden_states.double()) / torch.linalg.norm(whole)
    is_right = tasks.score_number(text.prompt.answer, answer.text).exact == 1
    return Measured(is_right, float(error))


wrong = partial(StudentError, "Wrong scores", place="")


class Asked(NamedTuple):
    """What a file asks for: its library, and whether its `score` takes the keys alone or the values too."""

    library: str
    inputs: tuple[str, ...]


def asked(source: bytes) -> Asked:
    """What `evictionary run` would give to the file: NumPy's arrays if it imports NumPy and not torch, and
    the arguments that its `score` has. A file that cannot be read gets torch tensors of keys and values.

    Raises StudentError for a `score` that reads what the contest does not give.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return Asked("torch", GIVEN)
    imports = {each for node in ast.walk(tree) for each in _imported(node)}
    library = "numpy" if "numpy" in imports and "torch" not in imports else "torch"
    scores = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "score"]
    if not scores:
        return Asked(library, GIVEN)
    names = [each.arg for each in (*scores[-1].args.posonlyargs, *scores[-1].args.args)]
    others = [name for name in names if name in INPUTS and name not in GIVEN]
    told = f"score reads {', '.join(others)}, and the contest gives keys and values"
    require(not others, told, partial(StudentError, "Wrong arguments", place=""))
    # Whatever they are called, two are the keys and the values, in this order.
    takes_one = len(names) == 1 and scores[-1].args.vararg is None
    return Asked(library, (names[0] if names[0] in GIVEN else "keys",) if takes_one else GIVEN)


def _imported(node: ast.AST) -> list[str]:
    """The packages that a statement imports."""
    if isinstance(node, ast.Import):
        return [each.name.partition(".")[0] for each in node.names]
    return [(node.module or "").partition(".")[0]] if isinstance(node, ast.ImportFrom) else []


def remote_score(child: Child, asked: Asked) -> Any:
    """A function `score(keys, values)` of torch tensors that the child computes; the scores are checked."""
    require("score" in child.functions, "score is missing", partial(StudentError, "No function", place=""))

    def score(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        given = {"keys": keys, "values": values}
        # As everywhere, a file in NumPy computes in float64.
        arrays = [
            (given[name].double() if asked.library == "numpy" else given[name]) for name in asked.inputs
        ]
        got, shape = child.call("score", *(each.numpy() for each in arrays)), tuple(keys.shape[:3])
        is_array = isinstance(got, np.ndarray)
        shown = f"{got.dtype} {got.shape}" if is_array else type(got).__name__
        is_right = is_array and got.dtype.kind == "f" and got.shape == shape
        require(is_right, f"got {shown}, wanted floats of shape {shape}", wrong)
        with np.errstate(over="ignore"):
            scores = got.astype(np.float32)
        require(np.isfinite(scores).all(), "got NaN or infinite numbers, wanted finite ones", wrong)
        return torch.from_numpy(scores)

    return score


def missing_quarters(value: float, enough: float, width: float) -> int:
    """How many quarters of the points a value costs that should be at most `enough`: one for each begun
    width above, at most four.

    With all or nothing, five texts decided about forty points:
    one file had them at four seeds and not at the fifth.
    """
    return min(4, max(0, math.ceil(round((value - enough) / width, 9))))


class Contest(Run):
    """A submission that is judged by what its scores do in the model."""

    def judge_steps(self, result: Judgement, explained: bool) -> None:
        """Judge the three steps and fill in the leaderboard; no failure of theirs needs more explaining."""
        scores, answers, closer = result.lines
        answers.reason = closer.reason = "needs scores first"
        try:
            measured = self._measured(result)
        except Exception as error:
            # the model wraps it
            told = error if isinstance(error, Gone | StudentError | ValueError) else error.__cause__
            if not isinstance(told, Gone | StudentError | ValueError):
                raise
            scores.verdict, scores.reason, scores.message = "failed", str(told), str(told)
            return
        scores.verdict, scores.points = "passed", scores.max_points
        right, wanted = (sum(one.is_right for one in each) for each in zip(*measured, strict=True))
        distance, limit = (
            float(np.mean([one.error for one in each])) for each in zip(*measured, strict=True)
        )
        answers.reason = f"{right} of {len(measured)} answers right, LagKV has {wanted}"
        closer.reason = f"relative distance {distance:.4f}, LagKV's is {limit:.4f}"
        missing = missing_quarters(wanted - right, 0, 0.5), missing_quarters(distance / limit, NEAR, 0.1)
        for line, quarters in zip((answers, closer), missing, strict=True):
            line.verdict, line.points = (
                "failed" if quarters else "passed",
                line.max_points * (4 - quarters) // 4,
            )
        result.leaderboard = [
            {"name": f"right of {len(measured)}", "value": right, "order": "desc"},
            {"name": "relative distance", "value": round(distance, 5), "order": "asc"},
        ]

    def _measured(self, result: Judgement) -> list[tuple[Measured, Measured]]:
        """The scorer and LagKV on each text, which is read
        once the scores of random keys have been found usable.
        """
        wanted = asked(self.path.read_bytes())
        with self.child(library=wanted.library) as child:
            result.walls = child.walls
            score = remote_score(child, wanted)
            generator = torch.Generator().manual_seed(self.seed("scores") % 2**63)
            keys, values = torch.randn(2, 1, 3, 40, 16, generator=generator)
            first, again = score(keys, values), score(keys, values)
            require(torch.equal(first, again), "the same keys and values scored twice differ", wrong)
            require(len(first.unique()) > 1, "every token has the same score", wrong)
            method = replace(
                resolve("knorm"), name="student", function=score, inputs=("keys", "values"), options={}
            )
            asked_for, measured = texts(self.seed("texts")), []
            for done, text in enumerate(asked_for):
                self.told(f"judging {self.origin} on each text", done, len(asked_for))
                measured.append((run_method(method, text), text.lagkv))
            return measured
