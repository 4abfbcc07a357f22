# %% [markdown]
# # KeyDiff: keep what points elsewhere
#
# **Which tokens should stay if you may look at the keys alone, at no query and at no attention weight?**
#
# KeyDiff ([arXiv 2504.15364](https://arxiv.org/abs/2504.15364)) answers: those whose keys point away from the average direction.
# It needs nothing but the keys, so it works with fast attention kernels, which never write the attention weights down.

# %% tags=["setup"]
import numpy as np
from matplotlib import pyplot as plt

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.evaluation import passkey
from evictionary.evaluation.questions import ask, prefill
from evictionary.reference import keydiff, keydiff_theory, keydiff_variants
from evictionary.reference.selection import top_k
from evictionary.spec_tests.harness.planted import load_mutants
from tutorials.lesson import BLUE, GREY, ORANGE, draw_kept, embedded, report, show

# %% [markdown]
# ## Four keys, by hand
#
# The keys are (10, 0), (0, 1), (.2, 1) and (1, 1). Three of them are short; one is long.
#
# By hand: divide each key by its length. You get (1, 0), (0, 1), about (.2, .98) and (.71, .71). Their mean $\mu$ is about (.48,
# .67). The score of a key is minus its cosine with $\mu$: a key *along* the average gets the lowest score.
#
# **Predict** Which key scores highest, and which lowest?

# %% tags=["predict"]
keys = np.array([[10.0, 0.0], [0.0, 1.0], [0.2, 1.0], [1.0, 1.0]])
scores = keydiff.score(keys)
print("anchor ", keydiff.anchor(keys).round(2))
print("scores ", scores.round(3))
print("order, best first", np.argsort(-scores, kind="stable"))
show(keydiff.unit, keydiff.anchor, keydiff.cosine, keydiff.score)


# %% tags=["drawing"] alt="Four keys as arrows on the unit circle with the anchor: the one at right angles is farthest"
def draw_directions(axes, keys, anchor, label):
    for place, direction in enumerate(keydiff.unit(keys)):
        axes.annotate("", direction, (0, 0), arrowprops={"arrowstyle": "->", "color": BLUE})
        axes.text(*(1.08 * direction), f"key {place}", color=BLUE, ha="center")
    axes.annotate("", keydiff.unit(anchor), (0, 0), arrowprops={"arrowstyle": "->", "color": ORANGE, "lw": 2})
    axes.add_patch(plt.Circle((0, 0), 1, fill=False, color=GREY, linestyle=":"))
    axes.set(xlim=(-0.15, 1.3), ylim=(-0.1, 1.25), aspect="equal", xticks=[], yticks=[], title=f"orange: {label}")


figure, axes = plt.subplots(figsize=(3.6, 3.4))
draw_directions(axes, keys, keydiff.anchor(keys), "the anchor, KD-8")
plt.show()

# %% [markdown]
# ## Why the average is enough (KD-7, KD-8)
#
# The idea behind it: keep keys that are unlike *each other*. Literally that is a matrix of $T^2$ cosines,
# $S_{ij}=\cos(k_i,k_j)$, for $T$ tokens, and the score $-\sum_j S_{ij}$ (KD-7). Write $\hat k_i=k_i/|k_i|$ for a key divided by
# its length, so that a cosine is $\hat k_i\cdot\hat k_j$, and $\mu=\frac1T\sum_j\hat k_j$ for the *anchor*. A row sum is then a
# dot product with a sum:
#
# $$\sum_j \hat k_i\cdot\hat k_j=\hat k_i\cdot\sum_j\hat k_j=T\,|\mu|\cos(k_i,\mu).$$
#
# So the cheap score, $-\cos(\mu,k_i)$ (KD-8), is the expensive one divided by the same positive number for every token: the
# ranking is the same.

# %%
show(keydiff.similarity_matrix, keydiff.pairwise_score)
many = np.random.default_rng(1).normal(size=(200, 8)) + 0.5
scale = len(many) * np.linalg.norm(keydiff.anchor(many))
print("largest difference", np.abs(keydiff.pairwise_score(many) - scale * keydiff.score(many)).max())

# %% [markdown]
# **Predict** At 100,000 tokens and 128 channels, how many times more multiplications does the matrix take?

# %% tags=["predict"]
length, head_dim = 100_000, 128
linear = keydiff_theory.operation_count(length, head_dim).multiplications
print(f"{length**2 * head_dim / linear:,.0f} times")

# %% [markdown]
# ## What goes wrong: the mean of the wrong thing
#
# The mean of the *keys* looks like a harmless shortcut. The long key (10, 0) then drags the anchor to itself. The project has
# this mistake planted as a mutant.
#
# **Predict** What happens to key 0, which was the best?

# %% tags=["predict"]
raw_mean = load_mutants()["keydiff.raw_mean_anchor"]
print("planted:", raw_mean.misconception, "- to be caught by", raw_mean.killed_by)
print("order of KD-8     ", np.argsort(-scores, kind="stable"))
print("order of the mutant", np.argsort(-raw_mean.function(keys[None, None])[0, 0], kind="stable"))

# %% tags=["drawing"] alt="The anchor as the mean of directions lies between the keys; of raw keys it lies on the long key"
figure, axes = plt.subplots(1, 2, figsize=(6.6, 3.4))
draw_directions(axes[0], keys, keydiff.anchor(keys), "KD-8, the mean of directions")
draw_directions(axes[1], keys, keys.mean(axis=0), "the mutant, the mean of keys")
plt.show()

# %% [markdown]
# The law that catches it needs no expected numbers: multiply any key by a positive number, and no score may change. The laws are
# properties of this kind, checked on hundreds of drawn inputs; [lesson 9](09_your_own_scorer.md) puts a scorer of yours to them.
#
# ## A real model
#
# Where do real keys point? One layer of SmolLM2, all its tokens: the cosine of each key with the anchor of its head.

# %%
model, tokenizer = embedded()
prompt = passkey.make(tokenizer, depth=0.3, tokens=300)
full_cache = EvictingCache(model, method=None)
prefill(model, prompt.context_ids, full_cache)
layer_keys = full_cache.layers[15].keys[0].numpy().astype(np.float64)
cosines = -keydiff.score(layer_keys)
print(
    "keys [H_kv, T, D]",
    layer_keys.shape,
    "   length of the anchor of each head",
    np.linalg.norm(keydiff.anchor(layer_keys), axis=-1).round(2),
)

# %% [markdown]
# **Predict** If the directions were spread evenly over a sphere in 64 dimensions, the cosines would lie around 0. Where do they
# lie?

# %% tags=["drawing", "predict"] alt="Histogram of the cosine of keys with the anchor for three heads, far above zero"
figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.6), sharey=True)
first, last = prompt.needle
for head, each in enumerate(axes):
    each.hist(cosines[head], bins=np.linspace(-0.2, 1, 40), color=BLUE, label="all tokens")
    each.hist(cosines[head, first:last], bins=np.linspace(-0.2, 1, 40), color=ORANGE, label="the number's sentence")
    each.set(title=f"layer 15, head {head}", xlabel="cosine with the anchor")
axes[0].set_ylabel("tokens")
axes[0].legend(loc="upper left", fontsize=7)
plt.show()

# %% [markdown]
# Keys share a strong common direction: nearly all cosines are large, and one token, the first of the text, points the other way.
# The number's sentence is not far out in this layer. A ranking needs only small differences, though.
#
# **Predict** A quarter of all tokens is kept. Of the tokens of the number's sentence, is it more or less than a quarter?

# %% tags=["predict"]
kept = top_k(
    np.concatenate([keydiff.score(layer.keys[0].numpy()) for layer in full_cache.layers]), full_cache.get_seq_length() // 4
)
print(f"of the number's sentence, over all layers and heads, {kept[:, first:last].mean():.0%} is kept")
print("in the first, second and last ten layers", kept[:, first:last].mean(axis=1).reshape(3, -1).mean(axis=1).round(2))

print("the number is", prompt.answer)
for ratio in (0.5, 0.75, 0.9):
    cache = EvictingCache.from_prefilled(model, full_cache, "keydiff", ratio)
    print(f"{ratio:.0%} removed: {ask(model, tokenizer, cache, prompt.question_ids, 10).text!r}")

# %% tags=["drawing"] alt="What KeyDiff keeps when 75 percent go: the first tokens, and in the middle layers the number"
figure, axes = plt.subplots(figsize=(6.4, 3))
draw_kept(axes, EvictingCache.from_prefilled(model, full_cache, "keydiff", 0.75), prompt.needle, "KeyDiff, 75 % removed")
plt.show()

# %% [markdown]
# The first tokens are kept nearly whole from the middle layers on: their keys are unlike all others. Such tokens draw much
# attention whatever they say, and are called *attention sinks*. The sentence with the number stands out in the middle layers.
#
# The paper also says that this is the *optimal* way to keep keys unlike each other. [Lesson 10](10_reading_a_paper.md) tests that
# sentence on five keys.
#
# ## Exercises
#
# **1.** Write the score in NumPy, for keys `[T, D]`. A zero key has no direction: its score is 0.


# %%
def distinctness(keys):
    raise NotImplementedError


# %%
def check_distinctness(attempt):
    drawn = np.random.default_rng(2).normal(size=(50, 6)) * np.random.default_rng(3).exponential(size=(50, 1)) + 0.3
    assert np.allclose(attempt(drawn), keydiff.score(drawn)), "normal keys of many lengths do not score as KD-8"
    drawn[7] = 0
    assert np.allclose(attempt(drawn), keydiff.score(drawn)), "a zero key is not scored 0, or it disturbs the others"


report(check_distinctness, distinctness)


# %% tags=["solution"]
def solution_distinctness(keys):
    lengths = np.linalg.norm(keys, axis=-1, keepdims=True)
    directions = keys / np.where(lengths == 0, 1, lengths)
    anchor = directions.mean(axis=0)
    return -directions @ anchor / np.linalg.norm(anchor)


report(check_distinctness, solution_distinctness)

# %% [markdown]
# **2.** Find three keys in two dimensions of which KD-8 and the mean of raw keys keep a different one, with a budget of 1.

# %%
three_keys = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


# %%
def check_three_keys(attempt):
    assert np.shape(attempt) == (3, 2), "three keys of two channels are wanted"
    right, other = top_k(keydiff.score(attempt), 1), top_k(keydiff_variants.raw_mean_score(attempt), 1)
    assert (right != other).any(), f"both keep key {right.argmax()}"


report(check_three_keys, three_keys)

# %% tags=["solution"]
# Two short keys side by side make the direction common; a long key the other way makes the raw mean point to itself.
solution_three_keys = np.array([[10.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
report(check_three_keys, solution_three_keys)

# %% [markdown]
# More: [move a key](../figures/keys.md) and see the scores change; [all equations of KeyDiff](../methods/keydiff.md). Next:
# [lesson 3, LagKV](03_lagkv.md), which looks at values too.
