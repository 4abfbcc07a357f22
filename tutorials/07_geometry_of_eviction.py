# %% [markdown]
# # The error of eviction, seen
#
# **Where does the output go when tokens are evicted, and where does the correction bring it?**
#
# An attention output is a weighted mean of values. With two channels one can draw it. This lesson draws equations MK-1 to MK-12
# of MomentKV ([arXiv 2606.01563](https://arxiv.org/abs/2606.01563)), whose first section is about any eviction at all.

# %% tags=["setup"]
import itertools

import numpy as np
from matplotlib import pyplot as plt

from evictionary.reference import momentkv
from evictionary.reference import momentkv_theory as theory
from evictionary.reference.knorm import score as knorm_score
from evictionary.reference.selection import top_k
from evictionary.spec_tests.harness.planted import load_mutants
from tutorials.lesson import BLUE, GREEN, GREY, ORANGE, report, show

# %% [markdown]
# ## One line, three points
#
# Eight tokens with keys and values of two channels. The blue ones stay, the orange ones go. $f_R$ is the output over the blue
# alone, $f_E$ that over the orange alone, $f$ that over all.
#
# By hand: if the orange tokens together have the weight $w_E$, then $f=(1-w_E)f_R+w_Ef_E$. So $f$ lies on the line from $f_R$ to
# $f_E$, and its distance from $f_R$ is the error.
#
# **Predict** If $w_E$ is a quarter, where on the line does $f$ lie?

# %% tags=["predict"] alt="Values as points, the outputs of kept and evicted tokens, and the full output on the line between them"
keys = np.array([[0.6, 1.0], [-0.4, 0.9], [0.9, -0.2], [0.1, 0.3], [1.0, -0.6], [-0.9, -0.4], [0.2, -0.9], [-0.5, 0.2]])
values = np.array([[0.3, 1.6], [0.6, 0.9], [1.1, 1.7], [0.5, 2.1], [2.9, 1.4], [1.5, 0.3], [2.8, 0.5], [1.8, 1.1]])
kept = np.arange(8) < 4
query = np.array([-1.0, -0.6])


def draw_values(axes):
    axes.scatter(*values[kept].T, color=BLUE, s=18, label="values kept")
    axes.scatter(*values[~kept].T, color=ORANGE, s=18, label="values evicted")
    axes.set(aspect="equal", xlabel="channel 0", ylabel="channel 1")


def mark_point(axes, point, name, colour, shift=(5, 5)):
    axes.plot(*point, marker="D", color=colour, markersize=7)
    axes.annotate(name, point, xytext=shift, textcoords="offset points", color=colour, fontsize=11)


full = theory.full_output(query, keys, values)
retained, evicted = theory.sub_outputs(query, keys, values, kept)
retained_mass, evicted_mass = theory.mass(query, keys, kept)
print(f"w_E = {evicted_mass:.3f}; distance of f from f_R, as a share of the line:", end=" ")
print(f"{np.linalg.norm(full - retained) / np.linalg.norm(evicted - retained):.3f}")
figure, axes = plt.subplots(figsize=(5.2, 3.8))
draw_values(axes)
axes.plot(*np.array([retained, evicted]).T, color=GREY, linestyle=":")
mark_point(axes, retained, "$f_R$", BLUE)
mark_point(axes, evicted, "$f_E$", ORANGE)
mark_point(axes, full, "$f$", "black")
axes.legend(fontsize=7)
plt.show()
show(theory.sub_outputs, theory.mass, theory.eviction_error)

# %% [markdown]
# The error is a product: how much weight was evicted, times how differently the evicted would have spoken (MK-4). A small weight
# with a strange opinion and a large weight with the common opinion can cost the same.
#
# ## Turn the query
#
# The tokens stay where they are; the query turns once around.
#
# **Predict** Is the error largest where the evicted weight is largest?

# %% tags=["predict"] alt="Evicted weight, distance and error against the angle of the query: the error is the product of the two"
angles = np.linspace(0, 2 * np.pi, 181)
queries = 2 * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
outputs = np.array([theory.full_output(each, keys, values) for each in queries])
parts = np.array([theory.sub_outputs(each, keys, values, kept) for each in queries])
masses = np.array([theory.mass(each, keys, kept)[1] for each in queries])
distances = np.linalg.norm(parts[:, 1] - parts[:, 0], axis=-1)
errors = np.linalg.norm(outputs - parts[:, 0], axis=-1)
figure, axes = plt.subplots(figsize=(6.4, 2.9))
axes.plot(np.degrees(angles), masses, color=ORANGE, label="evicted weight $w_E$")
axes.plot(np.degrees(angles), distances, color=BLUE, label="$|f_E-f_R|$")
axes.plot(np.degrees(angles), errors, color="black", label="error $|f-f_R|$")
axes.set(xlabel="angle of the query (degrees)", ylim=(0, 2.7))
axes.legend(ncols=3, loc="upper center")
plt.show()
for name, each in (("weight", masses), ("distance", distances), ("error", errors)):
    print(f"the {name} is largest at {np.degrees(angles[each.argmax()]):.0f} degrees")

# %% tags=["drawing"] alt="Paths of f, f_R and f_E while the query turns once: closed curves among the values"
figure, axes = plt.subplots(figsize=(5.2, 3.8))
draw_values(axes)
axes.plot(*parts[:, 0].T, color=BLUE, label="$f_R$")
axes.plot(*parts[:, 1].T, color=ORANGE, label="$f_E$")
axes.plot(*outputs.T, color="black", label="$f$")
axes.legend(fontsize=7)
plt.show()

# %% [markdown]
# Each curve stays inside the polygon of its own values: a softmax output is a weighted mean. If the two polygons lie apart, no
# choice of weights among the kept can speak for the evicted.
#
# ## Along and across (MK-5, MK-6)
#
# Part of the difference $f_E-f_R$ only makes $f_R$ longer or shorter; the rest turns it. Transformers divide by lengths again and
# again (layer norms), which forgives the first more than the second.

# %% alt="The difference from f_R to f_E split into a part along f_R and a part across"
along, across = theory.split_divergence(retained, evicted)
print("along", along.round(3), " across", across.round(3), " their dot product", round(float(along @ across), 12))
print(
    "squared error by MK-6",
    theory.squared_error(retained, evicted, evicted_mass).round(6),
    " and directly",
    ((full - retained) ** 2).sum().round(6),
)
figure, axes = plt.subplots(figsize=(5.2, 3.4))
axes.annotate("", retained, (0, 0), arrowprops={"arrowstyle": "->", "color": BLUE})
axes.annotate("", retained + along, retained, arrowprops={"arrowstyle": "->", "color": GREEN, "lw": 2})
axes.annotate("", evicted, retained + along, arrowprops={"arrowstyle": "->", "color": ORANGE, "lw": 2})
axes.annotate("along", retained + along / 2, xytext=(-38, -2), textcoords="offset points", color=GREEN)
axes.annotate("across", retained + along + across / 2, xytext=(4, 6), textcoords="offset points", color=ORANGE)
mark_point(axes, retained, "$f_R$", BLUE, (6, -12))
mark_point(axes, evicted, "$f_E$", ORANGE)
axes.set(aspect="equal", xlabel="channel 0", ylabel="channel 1", xlim=(0, 3), ylim=(0, 2))
plt.show()

# %% [markdown]
# ## The correction (MK-9, MK-11, MK-12)
#
# MomentKV keeps four sums of the evicted tokens ([lesson 5](05_momentkv.md)). They give two estimates: $\hat f_E$ for the
# point, $\hat w_E$ for the weight. The corrected output $\hat f$ lies on the line from $f_R$ to $\hat f_E$.
#
# **Predict** A longer query makes logits larger and attention sharper; the estimate is first order in the logits. Which way will
# $\hat f_E$ go as the query grows?


# %% tags=["predict"] alt="Four panels with growing queries: the estimate runs out of the polygon of values"
def corrected_outputs(query, moments):
    """Estimate of the evicted output and the corrected output; query [2], moments of one head."""
    estimate = momentkv.approximate_evicted(query, moments)
    log_evicted = momentkv.log_evicted_partition(query, moments)
    log_retained = np.logaddexp.reduce(theory.logits_of(query, keys[kept]))
    weights = np.exp(momentkv.log_mixing_weights(log_retained, log_evicted))
    return estimate, weights[0] * theory.sub_outputs(query, keys, values, kept)[0] + weights[1] * estimate


moments = momentkv.update(momentkv.no_moments(keys, values), keys, values, ~kept)
figure, axes = plt.subplots(2, 2, figsize=(7, 5.6), sharex=True, sharey=True)
for each, length in zip(axes.flat, (0.5, 2.0, 5.0, 10.0), strict=True):
    longer = length * query
    exact = theory.full_output(longer, keys, values)
    of_kept, of_evicted = theory.sub_outputs(longer, keys, values, kept)
    estimate, corrected = corrected_outputs(longer, moments)
    draw_values(each)
    each.plot(*np.array([of_kept, of_evicted]).T, color=GREY, linestyle=":")
    each.plot(*np.array([of_kept, estimate]).T, color=GREEN, linestyle=":")
    mark_point(each, of_kept, "$f_R$", BLUE, (5, -13))
    mark_point(each, of_evicted, "$f_E$", ORANGE)
    mark_point(each, estimate, r"$\hat f_E$", GREEN, (5, -12))
    mark_point(each, corrected, r"$\hat f$", GREEN, (-14, 4))
    mark_point(each, exact, "$f$", "black")
    alone, mended = np.linalg.norm(exact - of_kept), np.linalg.norm(exact - corrected)
    each.set(title=f"query x {length:g}: error {alone:.2f}, corrected {mended:.2f}", xlabel="", ylabel="")
    each.set(xlim=(-0.5, 3.2), ylim=(-1.3, 2.3))
    each.title.set_fontsize(9)
plt.show()

# %% [markdown]
# For short queries $\hat f_E$ sits on $f_E$. For long ones it runs away along a straight line, out of the polygon in which $f_E$
# must stay: a linear function has no bounds. The correction helps for sure as long as the estimate is nearer to $f_E$ than
# $\hat w_E/(2w_E-\hat w_E)$ times the distance of $f_R$ from it: that is derived in the reference (MK-36).

# %% alt="Error alone and corrected against the length of the query: the correction helps first and hurts later"
lengths = np.linspace(0.05, 12, 120)
exact = np.array([theory.full_output(length * query, keys, values) for length in lengths])
error_alone = [
    np.linalg.norm(f - theory.sub_outputs(length * query, keys, values, kept)[0]) for f, length in zip(exact, lengths, strict=True)
]
error_mended = [np.linalg.norm(f - corrected_outputs(length * query, moments)[1]) for f, length in zip(exact, lengths, strict=True)]
figure, axes = plt.subplots(figsize=(6, 2.7))
axes.plot(lengths, error_alone, color=ORANGE, label="kept alone, $|f-f_R|$")
axes.plot(lengths, error_mended, color=GREEN, label=r"corrected, $|f-\hat f|$")
axes.set(xlabel="length of the query (times the one above)", ylabel="error", ylim=(0, None))
axes.legend()
plt.show()
show(theory.largest_harmless_error)

# %% [markdown]
# ## What goes wrong: not centred
#
# $\tilde S=S-s_vs_k^\top/n$ removes the means from the sum of products (MK-24). A planted mistake leaves the second term out.
#
# **Predict** The evicted keys are shifted by the same vector, all values stay. The true $f_E$ does not move, since a softmax
# forgets a shift. Does the mutant's?

# %% tags=["predict"]
not_centred = load_mutants()["momentkv.approximation_not_centred"]
print("planted:", not_centred.misconception, "- to be caught by", not_centred.killed_by)
for shift in (0.0, 3.0):
    moved = keys + shift
    moments_of_moved = momentkv.update(momentkv.no_moments(moved, values), moved, values, ~kept)
    right = momentkv.approximate_evicted(query, moments_of_moved)
    print(f"keys + {shift:g}: right {right.round(3)}  mutant {not_centred.function(query, moments_of_moved).round(3)}")

# %% tags=["drawing"] alt="Estimates while the evicted keys are shifted: the right one stays, the mutant runs away"
figure, axes = plt.subplots(figsize=(5.2, 3.4))
draw_values(axes)
for shift in np.linspace(0, 1, 6):
    sums = momentkv.update(momentkv.no_moments(keys, values), keys + shift, values, ~kept)
    axes.plot(*momentkv.approximate_evicted(query, sums), "D", color=GREEN, markersize=7, label="right" if shift == 0 else None)
    axes.plot(*not_centred.function(query, sums), "x", color="black", label="mutant, shifts 0 to 1" if shift == 0 else None)
axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## Exercises
#
# **1.** From the three points alone, without keys or weights: how much weight was evicted?


# %%
def evicted_weight(full, retained, evicted):
    raise NotImplementedError


# %%
def check_evicted_weight(attempt):
    for place in (0, 40, 90, 150):
        got = attempt(outputs[place], parts[place, 0], parts[place, 1])
        assert np.isclose(got, masses[place]), f"got {got}, wanted {masses[place]:.4f}: where on the line does f lie?"


report(check_evicted_weight, evicted_weight)


# %% tags=["solution"]
def solution_evicted_weight(full, retained, evicted):
    line = evicted - retained
    return (full - retained) @ line / (line @ line)


report(check_evicted_weight, solution_evicted_weight)

# %% [markdown]
# **2.** Choose the four tokens to keep for *this* query, so that the error is below a tenth of the one that keeping the four
# shortest keys makes (KNorm). There are only 70 choices.

# %%
four_kept = top_k(knorm_score(keys[None, None]), 4)[0, 0]


# %%
def check_four_kept(attempt):
    assert np.shape(attempt) == (8,) and np.sum(attempt) == 4, "a mask with four tokens True is wanted"
    by_norm = top_k(knorm_score(keys[None, None]), 4)[0, 0]
    wanted = np.linalg.norm(full - theory.sub_outputs(query, keys, values, by_norm)[0]) / 10
    error = np.linalg.norm(full - theory.sub_outputs(query, keys, values, np.asarray(attempt, dtype=bool))[0])
    assert error < wanted, f"the error is {error:.3f}, wanted less than {wanted:.3f}"


report(check_four_kept, four_kept)

# %% tags=["solution"]
masks = [np.isin(np.arange(8), chosen) for chosen in itertools.combinations(range(8), 4)]
solution_four_kept = min(masks, key=lambda mask: np.linalg.norm(full - theory.sub_outputs(query, keys, values, mask)[0]))
print("keep", solution_four_kept.nonzero()[0])
report(check_four_kept, solution_four_kept)

# %% [markdown]
# More: [the same geometry to play with](../figures/moments.md). Next: [lesson 8](08_numpy_to_triton.md) makes a GPU kernel of
# KeyDiff's three lines; [lesson 10](10_reading_a_paper.md) reads papers.
