"""A step of an assignment, as its file says it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One line of the grade: a requirement of the paper, or
    a part of it, the laws that judge it, and its points.

    `needs` names the steps that must pass before this step is judged; `read` says where to read about it.
    `check` names a check of the grader beside the laws: constants (the student's own defaults), overflow
    (LagKV's deviations in the thousands), votes (GVote's samples, each by itself), equal (groups of
    equal numbers), sizes (batch items, heads, channels and tokens of a model), scales (KeyDiff's keys of
    1e-20 and 1e20), strides (a transposed tensor), blocks (H2O's scores of a prompt whose matrix the memory
    does not hold), compiled (the kernel as compiled code, executed), kernel (the scores depend on what a
    Triton kernel writes) or rows (the student's rows of scores show the planted mistakes of `catches`;
    `longest` bounds the tokens of a step with one row, 0 stands for many rows). `calm` leaves out inputs on
    which a softmax without its maximum overflows, so that one mistake does not cost a step by luck.
    `thoroughness` multiplies the number of inputs that each law draws, for mistakes that show on few inputs.
    """

    name: str
    requirement: str
    title: str
    points: int
    laws: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    read: str = ""
    check: str = ""
    thoroughness: int = 1
    calm: bool = False
    catches: tuple[str, ...] = ()
    longest: int = 0
