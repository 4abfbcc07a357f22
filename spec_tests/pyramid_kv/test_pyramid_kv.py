"""Laws of PyramidKV: PY-1 to PY-3."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import without

PYRAMID = "pyramid_kv.budgets"
counts: dict[str, Any] = {
    "budget": st.one_of(st.integers(1, 5000), st.integers(1, 2**17)),
    "num_layers": st.integers(1, 100),
    "beta": st.sampled_from([1, 1.5, 2, 14, 20, 100]),
}


def layers_of(impl, budget, num_layers, *, most=None, least=1, **settings):
    """The budgets of the layers; Violation unless there is one for each, they have this total, and lie
    between these numbers.
    """
    got = list(impl.pyramid_kv.budgets(budget, num_layers, **settings))
    equal(len(got), num_layers, "there is not one budget for each layer")
    total = num_layers * (budget if most is None else min(budget, most))
    equal(sum(got), total, "the budgets have another total")
    inside = least <= min(got) and (most is None or max(got) <= most)
    require(inside, f"budgets from {min(got)} to {max(got)} of {most} tokens", (least, most), got)
    return np.array(got)


def on_a_line(got, first, last, what):
    """Raise Violation unless budgets lie within one token of the straight line."""
    near(got.astype(float), np.linspace(first, last, len(got)), 1 + 1e-9, what)


@law("PY-2", of=PYRAMID, **counts)
def test_the_total_is_exact(impl, budget, num_layers, beta):
    """The budgets sum to num_layers * budget, and each is at least 1."""
    layers_of(impl, budget, num_layers, beta=beta)


@law("PY-1", of=PYRAMID, **counts)
def test_budgets_fall_linearly(impl, budget, num_layers, beta):
    """Every budget is within one token of the straight line from 2 b - b/beta to b/beta, and none exceeds
    the layer before.
    """
    got, last = np.array(impl.pyramid_kv.budgets(budget, num_layers, beta=beta)), max(1.0, budget / beta)
    on_a_line(
        got, budget if num_layers == 1 else 2 * budget - last, last, "a budget, from the straight line,"
    )
    require((np.diff(got) <= 0).all(), "a deeper layer has a larger budget", None, got)


@law(
    "PY-2",
    of=PYRAMID,
    not_for=without(PYRAMID, "length"),
    length=st.one_of(st.integers(1, 5000), st.integers(1, 2**17)),
    **counts,
)
def test_no_layer_is_given_more_tokens_than_there_are(impl, budget, num_layers, beta, length):
    """With length no budget exceeds it, the total stays num_layers * min(budget, length), and budgets fall
    on a straight line.
    """
    steps = np.diff(layers_of(impl, budget, num_layers, most=length, beta=beta, length=length))
    require((steps <= 0).all(), "a budget is larger than the one before", None, steps)
    require(not steps.size or np.ptp(steps) <= 3, "the steps differ by more than rounding", None, steps)


@law("PY-2", of=PYRAMID, not_for=without(PYRAMID, "length"))
def test_a_tenth_is_removed_where_a_tenth_is_asked(impl):
    """Of 400 tokens 360 are to stay, in four layers: 400, 373, 347 and 320, where 702 to 18 would leave
    1,060 of 1,440.
    """
    equal(list(impl.pyramid_kv.budgets(360, 4, length=400)), [400, 373, 347, 320], "other budgets")


@law(
    "PY-3",
    of=PYRAMID,
    not_for=without(PYRAMID, "length"),
    window=st.integers(0, 64),
    length=st.integers(1, 5000),
    **counts,
)
def test_every_layer_keeps_the_window_beside_its_share(impl, budget, num_layers, beta, window, length):
    """Beside a window the rest of the budget is a pyramid of its own; a budget below the window is the
    same in every layer.
    """
    least, rest = min(window, budget, length), budget - window
    got = layers_of(
        impl, budget, num_layers, most=length, least=least, beta=beta, length=length, window_size=window
    )
    if num_layers > 1 and window < budget <= length and 2 * rest <= length - window and rest / beta >= 1:
        on_a_line(
            got,
            window + 2 * rest - rest / beta,
            window + rest / beta,
            "a budget, from the line beside the window,",
        )


@law("PY-3", of=PYRAMID, not_for=without(PYRAMID, "length"))
def test_three_layers_beside_a_window_of_four(impl):
    """Budget 10, a window of 4, beta 2: 4 + 9, 4 + 6 and 4 + 3; a budget of 3 is 3 in each layer."""
    equal(list(impl.pyramid_kv.budgets(10, 3, beta=2, window_size=4)), [13, 10, 7], "other budgets")
    equal(list(impl.pyramid_kv.budgets(3, 3, beta=2, window_size=4)), [3, 3, 3], "other budgets")


@law("PY-1", of=PYRAMID)
def test_three_layers_of_ten(impl):
    """Budget 10, three layers, beta 2: 15, 10 and 5, exactly."""
    equal(list(impl.pyramid_kv.budgets(10, 3, beta=2)), [15, 10, 5], "other budgets")
