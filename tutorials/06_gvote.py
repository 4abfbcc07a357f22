# %% [markdown]
# # GVote: let queries vote on the budget
#
# **Every other method is told how many tokens to keep. Can the number itself be found?**
#
# GVote ([arXiv 2509.03136](https://arxiv.org/abs/2509.03136)) asks the current query how many tokens it needs, lets a few
# imagined future queries each name that many, and keeps whatever anyone named.

# %% tags=["setup"]
import numpy as np
from matplotlib import pyplot as plt

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.evaluation import passkey
from evictionary.evaluation.questions import ask, prefill
from evictionary.reference import gvote
from evictionary.spec_tests.harness.planted import load_mutants
from tutorials.lesson import BLUE, GREY, ORANGE, embedded, report, show

# %% [markdown]
# ## How many does one query need? (GV-A2, GV-A3)
#
# Four tokens with attention .5, .3, .15 and .05. The *nucleus* for $p$ is the smallest set of tokens whose weights sum to at
# least $p$; its size is the budget $B_0$.
#
# **Predict** How large is the nucleus for p = .5, .79, .81 and 1?

# %% tags=["predict"]
attention = np.array([0.5, 0.3, 0.15, 0.05])
for p in (0.5, 0.79, 0.81, 1.0):
    print(p, gvote.nucleus(attention, p).astype(int), "B_0 =", gvote.single_step_budget(gvote.nucleus(attention, p)))
show(gvote.nucleus)

# %% [markdown]
# A sharp head needs few tokens, a diffuse one many. That is the whole idea of the budget: it follows the shape of the attention.

# %% tags=["drawing"] alt="Cumulative attention of a sharp and a diffuse head: the sharp one reaches .95 after a few tokens"
random = np.random.default_rng(0)
figure, axes = plt.subplots(figsize=(6, 2.8))
for sharpness, colour in ((4.0, BLUE), (1.0, ORANGE)):
    logits = sharpness * random.normal(size=200)
    weights = np.sort(np.exp(logits) / np.exp(logits).sum())[::-1]
    needed = gvote.single_step_budget(gvote.nucleus(weights, 0.95))
    axes.plot(np.arange(1, 201), np.cumsum(weights), color=colour, label=f"logits with deviation {sharpness:g}: {needed} tokens")
axes.axhline(0.95, color=GREY, linestyle=":")
axes.set(xlabel="tokens, heaviest first", ylabel="attention so far")
axes.legend()
plt.show()

# %% [markdown]
# ## What goes wrong: the token that crosses the line
#
# A common slip in nucleus code: keep the tokens *while* the sum is still below $p$, and so lose the one that crosses it.
#
# **Predict** What does it keep of .5, .3, .15, .05 for p = .81?

# %% tags=["predict"]
crossing = load_mutants()["gvote.crossing_token_left_out"]
print("planted:", crossing.misconception, "- to be caught by", crossing.killed_by)
kept = crossing.function(attention, 0.81)
print("keeps", kept.astype(int), "with mass", attention[kept].sum())

# %% [markdown]
# ## The vote (GV-A9 to GV-A11)
#
# The current query is not the one that matters; those to come are. A layer makes its queries from *hidden states*, one vector
# for each token. GVote draws some from a Gaussian fitted to those of the prompt, makes queries $q_1,\dots,q_S$ of them, and
# averages their RoPE, the rotation by position, over the coming positions ([lesson 4](04_expected_attention.md) explains both).
# Each sample names its best $B_0$ tokens, and the union stays:
#
# $$\mathcal K=\bigcup_{s=1}^{S}\mathrm{top}_{B_0}\big(q_s\cdot k_1,\dots,q_s\cdot k_T\big).$$
#
# In two dimensions: 12 keys, five sampled queries, three votes each.
#
# **Predict** How many tokens can the union have at least and at most?

# %% tags=["predict"] alt="Left: keys and sampled queries. Right: which sample votes for which key, and the union"
keys = 2 * np.stack([np.cos(np.arange(12) * 2.4), np.sin(np.arange(12) * 2.4)], axis=-1) * random.uniform(0.5, 1, size=(12, 1))
samples = np.array([1.0, 0.5]) + random.normal(size=(5, 2))
votes = gvote.top_each(gvote.sampled_logits(samples, keys), np.full(5, 3))
union = gvote.union(votes)
print("at least 3, if all agree; at most 12 (or 5 * 3); here", union.sum())
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3))
left.scatter(*keys.T, c=[BLUE if each else GREY for each in union], zorder=2)
for place, key in enumerate(keys):
    left.annotate(str(place), key, xytext=(4, 4), textcoords="offset points", fontsize=8)
left.quiver(*np.zeros((2, 5)), *samples.T, color=ORANGE, angles="xy", scale_units="xy", scale=1, width=0.01)
left.set(aspect="equal", xlim=(-3, 4), ylim=(-3, 3), title="keys (blue: kept) and samples")
right.imshow(np.vstack([votes, union]), cmap="Blues", vmax=1.3)
right.axhline(4.5, color=ORANGE)
right.set(title="votes; last row: the union", xlabel="token", ylabel="sample", yticks=range(6), yticklabels=[*range(5), "all"])
plt.show()

# %%
show(gvote.select)

# %% [markdown]
# ## A real model
#
# Every layer and KV head gets its own number of tokens; the workbench stores them *ragged*, rows of different lengths without
# padding.
#
# **Predict** The prompt has 294 tokens. How many does the most modest head keep, and the hungriest?

# %% tags=["predict"]
model, tokenizer = embedded()
prompt = passkey.make(tokenizer, depth=0.3, tokens=300)
full_cache = EvictingCache(model, method=None, record=("queries", "hidden_states"))
prefill(model, prompt.context_ids, full_cache)
cache = EvictingCache.from_prefilled(model, full_cache, "gvote")
sizes = np.array([layer.lengths[0].tolist() for layer in cache.layers])
print(f"of {full_cache.get_seq_length()} tokens: from {sizes.min()} to {sizes.max()}, on average {sizes.mean():.0f}")

# %% tags=["drawing"] alt="Tokens kept by GVote in every layer and KV head: great differences between heads"
figure, axes = plt.subplots(figsize=(6.8, 2.1))
picture = axes.imshow(sizes.T, cmap="Blues", vmin=0, vmax=full_cache.get_seq_length(), aspect="auto")
axes.set(xlabel="layer", ylabel="KV head", yticks=range(3), title="tokens kept")
figure.colorbar(picture)
plt.show()

# %% [markdown]
# The knob is $p$ now, not a budget.
#
# **Predict** Does the cache shrink in proportion to $p$?

# %% tags=["predict"]
print("the number is", prompt.answer)
for p in (0.5, 0.8, 0.95, 0.99):
    cache = EvictingCache.from_prefilled(model, full_cache, "gvote", options={"p": p})
    answer = ask(model, tokenizer, cache, prompt.question_ids, 10)
    print(f"p = {p:4}: {cache.nbytes / full_cache.nbytes:4.0%} of the bytes kept, answer {answer.text!r}")

# %% [markdown]
# On this prompt GVote loses the number at every $p$, also where it keeps more bytes than KeyDiff does with half removed
# ([lesson 2](02_keydiff.md)). Its samples stand for queries like those of the text so far, and the question is not like the
# text: that is one suspect, not a finding. A method that imagines the coming queries is as good as its picture of them.
# [Five longer prompts](../retrieval.md) went no better on this model; the paper's models are larger. Try a text of your own
# before you conclude more.
#
# Two more uncertainties belong to the method: the samples are drawn, so the kept set varies with the seed; and nobody promises a
# size, so a memory limit needs something on top.
#
# ## Exercises
#
# **1.** Write the size of the nucleus, $B_0$, for one row of weights that sum to 1.


# %%
def nucleus_size(attention, p):
    raise NotImplementedError


# %%
def check_nucleus_size(attempt):
    for seed in range(20):
        weights = np.random.default_rng(seed).dirichlet(np.full(9, 0.5))
        for p in (0.0, 0.3, 0.8, 0.95):
            got, wanted = attempt(weights, p), gvote.nucleus(weights, p).sum()
            assert got == wanted, f"p = {p}, weights {weights.round(3)}: got {got}, wanted {wanted}"


report(check_nucleus_size, nucleus_size)


# %% tags=["solution"]
def solution_nucleus_size(attention, p):
    reached = np.cumsum(np.sort(attention)[::-1])
    return 1 + int((reached[:-1] < p).sum())


report(check_nucleus_size, solution_nucleus_size)

# %% [markdown]
# **2.** Six keys on a circle, 60 degrees apart, and two votes a sample. Give three sampled queries whose union is all six keys.

# %%
angles = np.arange(6) * np.pi / 3
circle = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
three_samples = np.array([[1.0, 0.1], [1.0, 0.2], [1.0, 0.3]])


# %%
def check_three_samples(attempt):
    assert np.shape(attempt) == (3, 2), "three queries of two channels are wanted"
    named = gvote.union(gvote.top_each(gvote.sampled_logits(attempt, circle), np.full(3, 2)))
    assert named.all(), f"they name {named.sum()} of the 6"


report(check_three_samples, three_samples)

# %% tags=["solution"]
# Between two keys each, 120 degrees apart.
between = np.pi / 6 + np.arange(3) * 2 * np.pi / 3
solution_three_samples = np.stack([np.cos(between), np.sin(between)], axis=-1)
report(check_three_samples, solution_three_samples)

# %% [markdown]
# More: [all equations of GVote](../methods/gvote.md). Next: [lesson 7](07_geometry_of_eviction.md), which draws what every
# eviction does to the output.
