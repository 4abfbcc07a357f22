# %% [markdown]
# # LagKV: judged by what comes next
#
# **A long text is compressed while it is read. Against what should a part of it be measured, if the question is not known?**
#
# LagKV ([arXiv 2504.04704](https://arxiv.org/abs/2504.04704)) cuts the cache into partitions and measures each against the
# *next* one: a token that varies strangely against what follows is worth keeping. Nothing but keys and values is needed.

# %% tags=["setup"]
import numpy as np
from matplotlib import pyplot as plt

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.evaluation import passkey
from evictionary.evaluation.questions import ask, prefill
from evictionary.reference import lagkv
from evictionary.reference.selection import budget
from evictionary.spec_tests.harness.planted import load_mutants
from tutorials.lesson import BLUE, GREEN, GREY, ORANGE, draw_kept, embedded, report, show

# %% [markdown]
# ## Two partitions, by hand
#
# Two channels: the first holds numbers around 100, the second numbers around 1. The partition at hand has three tokens, the next
# one two. The next one says what is usual: channel 0 runs from 100 to 110, channel 1 from 0 to 2.
#
# By hand: subtract the least, divide by the range. With $Z$ for keys or values of partition $p$, per channel (LK-9),
#
# $$\bar Z^{p}=\frac{Z^{p}-\min Z^{p+1}}{\max Z^{p+1}-\min Z^{p+1}}.$$
#
# Token 0 becomes (.5, .5), token 1 (.5, 2), token 2 (0, 0). The standard deviations over the two channels are 0, 1.06 and 0.
#
# **Predict** A token is scored by the standard deviation over its own channels; a softmax over the partition then makes shares
# of it (LK-10). Which of the three wins?

# %% tags=["predict"]
part = np.array([[105.0, 1.0], [105.0, 4.0], [100.0, 0.0]])
following = np.array([[100.0, 0.0], [110.0, 2.0]])
normalised = lagkv.normalise(part, following)
print(normalised)
print("scores", lagkv.variation_score(normalised).round(3))
show(lagkv.normalise, lagkv.variation_score)

# %% tags=["drawing"] alt="Three tokens in normalised channels, the unit square, the diagonal: token 1 alone lies off it"
figure, axes = plt.subplots(figsize=(3.4, 3.6))
axes.add_patch(plt.Rectangle((0, 0), 1, 1, color=GREEN, alpha=0.15))
axes.plot([0, 2.2], [0, 2.2], color=GREY, linestyle=":")
axes.plot(*normalised.T, "o", color=BLUE)
for token, at in enumerate(normalised):
    axes.annotate(f"token {token}", at, xytext=(6, -3), textcoords="offset points", color=BLUE)
axes.set(aspect="equal", xlim=(-0.2, 2.2), ylim=(-0.2, 2.2), xlabel="channel 0, normalised", ylabel="channel 1, normalised")
axes.set_title("green: the range of the next partition")
plt.show()

# %% [markdown]
# Token 1 wins. In channel 0 it is as usual; in channel 1 it is far beyond the range. The deviation over channels sees that one
# channel disagrees with the other: with two channels, it is the distance from the dotted diagonal. A token that is high in *all*
# channels alike would not be seen: its channels agree.
#
# ## Why normalise at all
#
# Channels of keys differ in size by orders of magnitude. Dividing by the range of the next partition makes the score blind to
# that: multiply a channel by any positive number and add any constant, in both partitions, and nothing changes (LK-9).

# %% alt="Left: two channels of very different size. Right: after normalising both lie between about 0 and 1, with one outlier"
random = np.random.default_rng(0)
size, shift = np.array([40.0, 0.5]), np.array([200.0, 0.0])
long_part, long_next = (random.normal(size=(30, 2)) * size + shift for _ in range(2))
long_part[12, 1] += 4
figure, (left, right) = plt.subplots(1, 2, figsize=(6.8, 2.8))
for channel, colour in enumerate((BLUE, ORANGE)):
    left.plot(long_part[:, channel], color=colour, marker=".", label=f"channel {channel}")
    right.plot(lagkv.normalise(long_part, long_next)[:, channel], color=colour, marker=".")
left.set(title="as cached", xlabel="token of the partition", ylabel="value")
right.set(title="normalised by the next partition", xlabel="token of the partition")
right.axhspan(0, 1, color=GREY, alpha=0.2)
left.set_ylim(top=400)
left.legend(loc="upper left", ncols=2)
plt.show()
plain = lagkv.score(long_part, long_part, long_next, long_next)
moved = [states * [7, 1000] + [3, -5] for states in (long_part, long_next)]
print("largest change after an affine map", np.abs(lagkv.score(moved[0], moved[0], moved[1], moved[1]) - plain).max())
print("the best token is", plain.argmax())

# %% [markdown]
# ## The score of a token (LK-7 to LK-11)
#
# The softmax over the partition turns each list of deviations into shares that sum to 1, for the keys and for the values alike.
# The two are added, so the scores of a partition sum to 2:
#
# $$\mathrm{score}_i=\mathrm{softmax}_i\big(\mathrm{std}(\bar K)\big)+\mathrm{softmax}_i\big(\mathrm{std}(\bar V)\big).$$

# %%
show(lagkv.score)
print("sum of the scores", plain.sum())

# %% [markdown]
# ## How many tokens stay (LK-12)
#
# The first $S$ tokens stay: they are *sinks*, which draw attention whatever they say. The rest is cut into partitions of $L$
# tokens. Each partition but the last keeps $\lfloor rL\rfloor$ tokens; the last one and what comes after it stay whole, for
# nothing has followed them yet. Of $L_s$ tokens there remain
#
# $$L_R=S+\lfloor rL\rfloor\Big(\Big\lfloor\frac{L_s-S}{L}\Big\rfloor-1\Big)+L+\big((L_s-S)\bmod L\big),$$
#
# and all of them if there are fewer than $S+2L$.

# %% alt="Tokens kept against tokens read: a staircase of teeth, first the diagonal, then slower growth"
show(lagkv.retained_length)
settings = {"keep_ratio": 0.5, "sink_size": 16, "lag_size": 128}
lengths = np.arange(1, 1200)
retained = np.array([lagkv.retained_length(int(length), **settings) for length in lengths])
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8))
left.plot(lengths, retained, color=BLUE)
left.plot(lengths, lengths, color=GREY, linestyle=":")
left.set(xlabel="tokens read", ylabel="tokens kept", title="S = 16, L = 128, r = 1/2")
right.plot(lengths, 1 - retained / lengths, color=ORANGE)
right.axhline(0.5, color=GREY, linestyle=":")
right.set(xlabel="tokens read", ylabel="fraction removed")
plt.show()

# %% [markdown]
# **Predict** You ask for half. How much is removed of 271 tokens, of 272, of 399, of 400?

# %% tags=["predict"]
for length in (271, 272, 399, 400, 4000):
    print(f"{length:5} tokens: {lagkv.compression_ratio(length, **settings):.3f} removed")

# %% [markdown]
# Never the half that was asked for, and not even growing: the ratio is a limit that is approached in teeth. The paper's defaults
# are $S=16$ and $L=1024$, so nothing happens at all below 2,064 tokens. A reimplementation that ignores this compresses short
# prompts that the method leaves alone.
#
# ## What goes wrong: its own range
#
# A planted mistake: normalise the partition by its *own* minimum and maximum. It looks the same on paper.
#
# **Predict** What becomes of the outlier, whose value now defines the range?

# %% tags=["predict"]
own_range = load_mutants()["lagkv.own_range"]
print("planted:", own_range.misconception, "- to be caught by", own_range.killed_by)
wrong = own_range.function(long_part, long_part, long_next, long_next)
print("score of token 12, right:", plain[12].round(3), " mutant:", wrong[12].round(3))

# %% [markdown]
# Inside its own range no number is larger than 1, so the outlier cannot stand out by more than that. The paper measures this
# variant as well, under the name LocalKV (LK-14, LK-15). It is a worse method, not only a slip.
#
# ## A real model
#
# Our prompt has some 300 tokens, so we take small partitions, $L=32$. To compare methods at equal size, the workbench (the part
# of the project that runs a method in a model) asks for a budget and solves LK-13 for $r$, as the paper does.
#
# **Predict** Sinks, the last partition and the rest after it are kept anyway. What is left of each other partition if 75 % are
# removed?

# %% tags=["predict"]
model, tokenizer = embedded()
prompt = passkey.make(tokenizer, depth=0.3, tokens=300)
full_cache = EvictingCache(model, method=None)
prefill(model, prompt.context_ids, full_cache)
length = full_cache.get_seq_length()
caches = {}
print("the number is", prompt.answer)
for ratio in (0.25, 0.5, 0.75):
    caches[ratio] = EvictingCache.from_prefilled(model, full_cache, "lagkv", ratio, {"lag_size": 32})
    keep_ratio = lagkv.keep_ratio_for(length, budget(length, ratio), lag_size=32)
    answer = ask(model, tokenizer, caches[ratio], prompt.question_ids, 10)
    print(f"{ratio:.0%} removed: {float(keep_ratio * 32):2.0f} of the 32 tokens of each partition stay, answer {answer.text!r}")

# %% tags=["drawing"] alt="The tokens that LagKV keeps: sinks and the end whole, the same number of each other partition"
figure, axes = plt.subplots(figsize=(6.4, 3))
draw_kept(axes, caches[0.5], prompt.needle, "LagKV, partitions of 32, half removed")
for start in range(16, length, 32):
    axes.axvline(start - 0.5, color="limegreen", linewidth=1.2)
plt.show()

# %% [markdown]
# The green lines are the partitions. The first 16 tokens and the end are whole; every other partition keeps the same number of
# tokens, so a partition full of news loses as much as one full of filler. That is the price of deciding partition by partition,
# and with a budget as small as the fixed part nothing at all is left of the middle.
#
# ## Exercises
#
# **1.** Write LK-12 yourself.


# %%
def tokens_left(length, kept_of_a_partition, sink_size, lag_size):
    raise NotImplementedError


# %%
def check_tokens_left(attempt):
    for length in (0, 1, 15, 16, 271, 272, 273, 399, 400, 4001):
        got, wanted = attempt(length, 64, 16, 128), lagkv.retained_length(length, **settings)
        assert got == wanted, f"{length} tokens: got {got}, wanted {wanted}"


report(check_tokens_left, tokens_left)


# %% tags=["solution"]
def solution_tokens_left(length, kept_of_a_partition, sink_size, lag_size):
    if length < sink_size + 2 * lag_size:
        return length
    partitions, rest = divmod(length - sink_size, lag_size)
    return sink_size + kept_of_a_partition * (partitions - 1) + lag_size + rest


report(check_tokens_left, solution_tokens_left)

# %% [markdown]
# **2.** A token that is extreme, but in all channels alike, is not seen. Give one token of four channels that lies far outside
# the range of `calm_next` in every channel and still scores lowest among `calm_part` with itself added at the end.

# %%
calm_part, calm_next = random.uniform(size=(2, 20, 4)) * [1.0, 10.0, 100.0, 1000.0]
unseen = calm_part.mean(axis=0)


# %%
def check_unseen(attempt):
    scaled = lagkv.normalise(np.atleast_2d(attempt), calm_next)[0]
    assert (scaled > 5).all(), f"in units of the range it lies at {scaled.round(1)}: not far outside"
    scores = lagkv.variation_score(lagkv.normalise(np.vstack([calm_part, attempt]), calm_next))
    assert scores.argmin() == len(calm_part), "another token scores lower"


report(check_unseen, unseen)

# %% tags=["solution"]
low, high = lagkv.reference_minimum(calm_next)[0], lagkv.reference_maximum(calm_next)[0]
solution_unseen = low + 10 * (high - low)
report(check_unseen, solution_unseen)

# %% [markdown]
# More: [move a key](../figures/keys.md) against the next partition; [all equations of LagKV](../methods/lagkv.md). Next:
# [lesson 4, Expected Attention](04_expected_attention.md), which looks ahead.
