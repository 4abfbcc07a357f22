"""The open assignment: a student's scorer in the embedded model, beside LagKV, under one budget.

The model runs in the parent. The scorer runs in a child process and is sent the keys and values of one layer
at a time.
"""

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
from evictionary.methods.resolve import resolve
from evictionary.models.load import load
from evictionary.spec_tests.judge.remote import Gone

RATIO = 0.75
LAG = {"lag_size": 128}
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
    """One text read by the model, with the results of the full cache and of LagKV."""

    prompt: passkey.Passkey
    full: EvictingCache
    answer: Answer

    @cached_property
    def lagkv(self) -> Measured:
        return run_method("lagkv", self, LAG)


@cache
def texts(seed: int) -> list[Text]:
    """Read five texts, of a check as of a grade, with random places of the number: what `check` says holds
    for a grade too.

    They are read once for all submissions that a process grades.
    """
    model, tokenizer = load_model()
    draw, found = random.Random(seed), []
    for low in (0, 0.2, 0.4, 0.6, 0.8):
        depth = round(draw.uniform(low, low + 0.2), 3)
        prompt = passkey.make(tokenizer, depth=depth, seed=seed % 2**31, tokens=1200)
        full = EvictingCache(model, method=None)
        prefill(model, prompt.context_ids, full)
        found.append(Text(prompt, full, ask(model, tokenizer, full, prompt.question_ids, 12)))
    return found


def run_method(method: Any, text: Text, options: dict[str, Any] | None = None) -> Measured:
    """Compress the cache of a text by a method, and ask for the number."""
    model, tokenizer = load_model()
    compressed = EvictingCache.from_prefilled(model, text.full, method, RATIO, options)
    answer = ask(model, tokenizer, compressed, text.prompt.question_ids, 12)
    whole = text.answer.hidden_states.double()
    error = torch.linalg.norm(whole - answer.hidden_states.double()) / torch.linalg.norm(whole)
    is_right = tasks.score_number(text.prompt.answer, answer.text).exact == 1
    return Measured(is_right, float(error))


wrong = partial(StudentError, "Wrong scores", place="")


def remote_score(child: Child) -> Any:
    """A function `score(keys, values)` of torch tensors that the child computes; the scores are checked."""
    require("score" in child.functions, "score is missing", partial(StudentError, "No function", place=""))

    def score(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        got, shape = child.call("score", keys.numpy(), values.numpy()), tuple(keys.shape[:3])
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
        with self.child() as child:
            result.walls = child.walls
            score = remote_score(child)
            generator = torch.Generator().manual_seed(self.seed("scores") % 2**63)
            keys, values = torch.randn(2, 1, 3, 40, 16, generator=generator)
            first, again = score(keys, values), score(keys, values)
            require(torch.equal(first, again), "the same keys and values scored twice differ", wrong)
            require(len(first.unique()) > 1, "every token has the same score", wrong)
            method = replace(
                resolve("knorm"), name="student", function=score, inputs=("keys", "values"), options={}
            )
            return [(run_method(method, text), text.lagkv) for text in texts(self.seed("texts"))]
