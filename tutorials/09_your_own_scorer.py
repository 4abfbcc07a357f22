# %% [markdown]
# # Write your own scorer and have it judged
#
# **Your scorer runs and gives plausible numbers. How do you find out that it is wrong?**
#
# A *law* is a property that every right implementation has, checked on drawn inputs. In this lesson a KeyDiff with a common
# mistake is put to the laws, mended, and then a scorer of our own runs in a real model.

# %% tags=["setup"]
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.evaluation import passkey
from evictionary.evaluation.questions import ask, prefill
from evictionary.reference import keydiff, keydiff_variants
from evictionary.spec_tests import test_keydiff
from tutorials.lesson import BLUE, ROOT, draw_kept, embedded, report, show

# %% [markdown]
# ## A first attempt
#
# A file named as in `reference/`, with the functions that it provides. NumPy or torch, that is all; there is nothing to inherit
# or register.

# %%
place = tempfile.TemporaryDirectory()  # gone when the lesson ends
folder = Path(place.name) / "my_kernels"
folder.mkdir()
first_attempt = """import numpy as np


def unit(vectors):
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)


def score(keys):
    anchor = unit(keys.mean(axis=-2, keepdims=True))
    return -(unit(keys) * anchor).sum(axis=-1)
"""
written = (folder / "keydiff.py").write_text(first_attempt)

# %% [markdown]
# The usual test: compare with the reference on random numbers. By hand first: for two keys of length one, (1, 0) and (0, 1),
# both have the mean in the middle and score $-\cos 45°=-.71$. And with many normal keys?
#
# **Predict** Do the scores agree?

# %% tags=["predict"] alt="Scores of the attempt against the reference for normal keys: close to the diagonal but not on it"
namespace = {}
exec((folder / "keydiff.py").read_text(), namespace)
attempt = namespace["score"]
print("two unit keys", attempt(np.eye(2)).round(2), keydiff.score(np.eye(2)).round(2))
random_keys = np.random.default_rng(0).normal(size=(300, 64)) + 0.3
mine, right = attempt(random_keys), keydiff.score(random_keys)
print("largest difference", np.abs(mine - right).max().round(3), "  correlation", np.corrcoef(mine, right)[0, 1].round(4))
figure, axes = plt.subplots(figsize=(3.4, 3))
axes.plot(right, mine, ".", color=BLUE, markersize=4)
axes.set(xlabel="reference", ylabel="attempt")
plt.show()

# %% [markdown]
# A correlation like this, or a tolerance of a few hundredths, lets it pass: normal keys all have nearly the same length, so a
# mistake in the weighting of lengths hardly shows.
#
# ## What goes wrong: ask the laws
#
# The laws know nothing of this implementation. They draw keys of very different lengths, equal keys, zero keys, keys that
# cancel.


# %%
def judge(name):
    """The end of what `pytest spec_tests/test_keydiff.py --impl FOLDER` prints, for the laws of KD-8 that a score is put to."""
    command = [sys.executable, "-m", "pytest", "spec_tests/test_keydiff.py", "--impl", str(folder.parent / name)]
    command += ["--profile", "student", "-q", "--color=no", "-p", "no:cacheprovider", "-k"]
    command += ["cosine_to_the_anchor or cancel or rescaling or alike or refused"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.replace(f"{folder.parent}/", "").splitlines()


# %% [markdown]
# **Predict** Which smallest input will they find? Two keys, or many?

# %% tags=["predict"]
lines = judge("my_kernels")
start = next(place for place, line in enumerate(lines) if "does not hold" in line)
end = next(place for place, line in enumerate(lines[start:], start) if "to see it again" in line)
print("\n".join(lines[start:end]))
print("...")
print("\n".join(line for line in lines if line.startswith("KD-8 ") and "laws" in line))

# %% [markdown]
# The report has shrunk the input to something that fits on a page, and names the misconception, since somebody has made this
# mistake before: it is among the planted ones. Here is one of the laws that found it.

# %%
show(test_keydiff.test_rescaling_each_key_changes_nothing.hypothesis.inner_test.__wrapped__)

# %% [markdown]
# The law needs no table of right answers. It says what must not change, and that is enough to kill every scorer in which lengths
# count.
#
# ## Mended
#
# **Predict** The mean of unit keys, then. Is anything else wrong?

# %% tags=["predict"]
second_attempt = first_attempt.replace("keys.mean", "unit(keys).mean")
written = (folder / "keydiff.py").write_text(second_attempt)
lines = judge("my_kernels")
print("\n".join(line for line in lines if line.startswith("KD-8 ") and "laws" in line))
print("\n".join(line.strip() for line in lines if line.startswith(("  the law", "  what is wrong"))))

# %% [markdown]
# What is left are the edges: arguments that make no sense must raise a `ValueError` that names them.

# %%
guard = """def score(keys):
    if keys.ndim < 2 or 0 in keys.shape:
        raise ValueError(f"keys: got shape {keys.shape}, wanted [..., T, D] with at least one token")
"""
written = (folder / "keydiff.py").write_text(second_attempt.replace("def score(keys):\n", guard))
print("\n".join(line for line in judge("my_kernels") if line.startswith("KD-8 ") and "laws" in line))

# %% [markdown]
# All five hold. Further laws, left out here to save time, ask for keys whose squares leave the range of the numbers. Exercise 1
# is about those.
#
# ## A scorer of your own in a real model
#
# A new method has no paper and no laws yet, but it can run. The names of its arguments say what it reads: `keys`, `values`,
# `queries` and more. Ours multiplies how distinct a key is with how long its value is.

# %%
(folder / "mine.py").write_text('''import torch
from evictionary.optimized import keydiff


def score(keys, values, *, power=1.0):
    """How distinct the key is, from 0 to 2, times the length of the value to a power; [B, H_kv, T]."""
    return (1 + keydiff.score(keys)) * torch.linalg.norm(values.float(), dim=-1) ** power
''')
model, tokenizer = embedded()
prompt = passkey.make(tokenizer, depth=0.3, tokens=300)
full_cache = EvictingCache(model, method=None)
prefill(model, prompt.context_ids, full_cache)

# %% [markdown]
# **Predict** Does the length of the value help to find the number, or does it hurt?

# %% tags=["predict"]
print("the number is", prompt.answer)
caches = {}
for power in (0.0, 1.0, 4.0):
    caches[power] = EvictingCache.from_prefilled(model, full_cache, str(folder / "mine.py"), 0.75, {"power": power})
    answer = ask(model, tokenizer, caches[power], prompt.question_ids, 10)
    print(f"power {power:g}, 75 % removed: {answer.text!r}")

# %% [markdown]
# One prompt cannot tell them apart. `evictionary eval --methods path/to/mine.py` asks many, with a result file and a report.

# %% tags=["drawing"] alt="Tokens kept by distinctness alone and with the length of the value to the fourth power"
figure, axes = plt.subplots(2, 1, figsize=(6.4, 4.4), sharex=True)
for each, power in zip(axes, (0.0, 4.0), strict=True):
    draw_kept(each, caches[power], prompt.needle, f"power {power:g}, 75 % removed")
axes[0].set_xlabel("")
plt.show()

# %% [markdown]
# ## A law of your own
#
# What must be true of *any* scorer of keys? One property: the order in which tokens stand in memory is no information, so
# permuted tokens give permuted scores (positions are in the keys already, by RoPE, the rotation by position). As a function
# that judges a scorer:


# %%
def law_of_order(scorer):
    """Permuting the tokens permutes the scores and changes nothing else."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        keys, order = random.normal(size=(9, 4)), random.permutation(9)
        assert np.allclose(scorer(keys)[order], scorer(keys[order])), f"broken for seed {seed}"


law_of_order(keydiff.score)
causal_mean = np.vectorize(lambda keys: -keydiff.cosine(keys, keydiff.unit(keys).cumsum(axis=0))[:, -1], signature="(t,d)->(t)")
report(law_of_order, causal_mean)

# %% [markdown]
# The second scorer compares each key with the mean of the keys *up to it*, which breaks the law. Whether that is a mistake or a
# method is a decision; a law makes it a visible one.
#
# ## Exercises
#
# **1.** Write a KeyDiff score that also survives zero keys, keys that cancel, and keys whose squares overflow.


# %%
def robust_score(keys):
    units = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = units.mean(axis=-2, keepdims=True)
    return -(units * anchor).sum(axis=-1) / np.linalg.norm(anchor, axis=-1)


# %%
def check_robust_score(attempt):
    cases = {
        "a zero key": np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]),
        "keys that cancel": np.array([[1.0, 0.0], [-1.0, 0.0]]),
        "huge keys": np.array([[1e200, 0.0], [1e200, 1e200]]),
    }
    with np.errstate(all="ignore"):
        for name, keys in cases.items():
            got, wanted = attempt(keys), keydiff.score(keys)
            assert np.allclose(got, wanted), f"{name}: got {got}, wanted {wanted}"


report(check_robust_score, robust_score)


# %% tags=["solution"]
def solution_robust_score(keys):
    def unit(vectors):
        largest = np.abs(vectors).max(axis=-1, keepdims=True)
        vectors = vectors / np.where(largest == 0, 1, largest)  # its largest component is now 1, and its square too
        length = np.linalg.norm(vectors, axis=-1, keepdims=True)
        return vectors / np.where(length == 0, 1, length)

    units = unit(keys)
    return -(units * unit(units.mean(axis=-2, keepdims=True))).sum(axis=-1)


report(check_robust_score, solution_robust_score)

# %% [markdown]
# **2.** Write a law that holds for KeyDiff and is broken by the mean of raw keys. It gets a scorer for keys `[T, D]` and raises
# an AssertionError where the law is broken.


# %%
def my_law(scorer):
    assert scorer(np.eye(3)).shape == (3,)


# %%
def check_my_law(attempt):
    attempt(keydiff.score)
    try:
        attempt(keydiff_variants.raw_mean_score)
    except AssertionError:
        return
    raise AssertionError("the mean of raw keys passes your law")


report(check_my_law, my_law)


# %% tags=["solution"]
def solution_my_law(scorer):
    keys = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert np.allclose(scorer(keys), scorer(keys * [[8.0], [1.0], [1.0]])), "the length of a key counts"


report(check_my_law, solution_my_law)

# %% [markdown]
# More: [three reports in full](../judging.md), [how to plug a kernel in](../reference/plug_in.md), [how to add a
# method](../reference/add_a_method.md). Next: [lesson 10](10_reading_a_paper.md), in which papers are put to the test.
