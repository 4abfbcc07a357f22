"""The open assignment: a student's scorer in the embedded model, beside LagKV, under one budget.

The model runs in the parent. The scorer runs in a child process and is sent the keys and values of one layer at a time.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.classroom.child import Child, StudentError
from evictionary.classroom.judgement import Judgement, Run
from evictionary.evaluation import passkey
from evictionary.evaluation.questions import Answer, ask, prefill
from evictionary.methods.resolve import resolve
from evictionary.models.load import load
from evictionary.spec_tests.judge.remote import Gone

RATIO = 0.75
LAG = {"lag_size": 128}
NEAR = 1.05  # times LagKV's distance: over five texts the mean is uncertain by a few percent
load_model = cache(load)  # the embedded one, once in a process


@dataclass(frozen=True)
class Setting:
    """The texts of one grading: their seed, their length, and the place of the number in each."""

    seed: int
    tokens: int
    depths: tuple[float, ...]


@dataclass
class Text:
    """One text read by the model, with the results of the full cache and of LagKV."""

    prompt: passkey.Passkey
    full: EvictingCache
    answer: Answer
    lagkv_right: bool
    lagkv_error: float


def setting(seed: int) -> Setting:
    """Five texts, of a check as of a grade, with random places of the number: what `check` says holds for a grade too."""
    draw = random.Random(seed)
    return Setting(seed % 2**31, 1200, tuple(round(draw.uniform(low, low + 0.2), 3) for low in (0, 0.2, 0.4, 0.6, 0.8)))


@cache
def texts(chosen: Setting) -> list[Text]:
    """Read each text once for all submissions that a process grades."""
    model, tokenizer = load_model()
    found = []
    for depth in chosen.depths:
        prompt = passkey.make(tokenizer, depth=depth, seed=chosen.seed, tokens=chosen.tokens)
        full = EvictingCache(model, method=None)
        prefill(model, prompt.context_ids, full)
        answer = ask(model, tokenizer, full, prompt.question_ids, 12)
        text = Text(prompt, full, answer, False, 0.0)
        text.lagkv_right, text.lagkv_error = run_method("lagkv", text, LAG)
        found.append(text)
    return found


def run_method(method: Any, text: Text, options: dict[str, Any] | None = None) -> tuple[bool, float]:
    """Whether the answer is right, and how far the final state is from the full cache's, relative to its length."""
    model, tokenizer = load_model()
    compressed = EvictingCache.from_prefilled(model, text.full, method, RATIO, options)
    answer = ask(model, tokenizer, compressed, text.prompt.question_ids, 12)
    whole = text.answer.hidden_states.double()
    error = torch.linalg.norm(whole - answer.hidden_states.double()) / torch.linalg.norm(whole)
    return text.prompt.is_right(answer.text), float(error)


def remote_score(child: Child) -> Any:
    """A function `score(keys, values)` of torch tensors that the child computes; the scores are checked."""

    def score(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        got = child.call("score", keys.numpy(), values.numpy())
        if not isinstance(got, np.ndarray) or got.dtype.kind != "f" or got.shape != tuple(keys.shape[:3]):
            shown = f"{got.dtype} {got.shape}" if isinstance(got, np.ndarray) else type(got).__name__
            raise StudentError("Wrong scores", f"got {shown}, wanted floats of shape {tuple(keys.shape[:3])}", "")
        with np.errstate(over="ignore"):
            scores = got.astype(np.float32)
        if not np.isfinite(scores).all():
            raise StudentError("Wrong scores", "got NaN or infinite numbers, wanted finite ones", "")
        return torch.from_numpy(scores)

    return score


def missing_quarters(value: float, enough: float, width: float) -> int:
    """How many quarters of the points a value costs that should be at most `enough`: one for each begun width above, at most four.

    With all or nothing, five texts decided about forty points: one file had them at four seeds and not at the fifth.
    """
    return min(4, max(0, math.ceil(round((value - enough) / width, 9))))


def judge(run: Run, result: Judgement) -> None:
    """Judge the three steps and fill in the leaderboard."""
    scores, answers, closer = result.lines
    points = {step.name: step.points for step in run.assignment.steps}
    for line in (answers, closer):
        line.reason = "needs scores first"
    scores.verdict = "failed"
    try:
        with run.child() as child:
            result.walls = child.walls
            if "score" not in child.functions:
                raise StudentError("No function", "score is missing", "")
            score = remote_score(child)
            generator = torch.Generator().manual_seed(run.seed("scores") % 2**63)
            keys, values = torch.randn(2, 1, 3, 40, 16, generator=generator)
            if not torch.equal(score(keys, values), score(keys, values)):
                raise StudentError("Wrong scores", "the same keys and values scored twice differ", "")
            if len(score(keys, values).unique()) == 1:
                raise StudentError("Wrong scores", "every token has the same score", "")
            scores.verdict, scores.points = "passed", points["scores"]
            method = replace(resolve("knorm"), name="student", function=score, inputs=("keys", "values"), options={})
            chosen = texts(setting(run.seed("texts")))
            measured = [run_method(method, text) for text in chosen]
    except Exception as error:
        told = error if isinstance(error, Gone | StudentError | ValueError) else error.__cause__  # the model wraps it
        if not isinstance(told, Gone | StudentError | ValueError):
            raise
        scores.verdict, scores.points = "failed", 0
        scores.reason = scores.message = str(told)
        return
    right, wanted = sum(each for each, _ in measured), sum(text.lagkv_right for text in chosen)
    distance = float(np.mean([each for _, each in measured]))
    limit = float(np.mean([text.lagkv_error for text in chosen]))
    for line, parts, reason in (
        (answers, missing_quarters(wanted - right, 0, 0.5), f"{right} of {len(chosen)} answers right, LagKV has {wanted}"),
        (closer, missing_quarters(distance / limit, NEAR, 0.1), f"relative distance {distance:.4f}, LagKV's is {limit:.4f}"),
    ):
        line.verdict, line.reason = ("failed" if parts else "passed"), reason
        line.points = line.max_points * (4 - parts) // 4
    result.leaderboard = [
        {"name": f"right of {len(chosen)}", "value": right, "order": "desc"},
        {"name": "relative distance", "value": round(distance, 5), "order": "asc"},
    ]
