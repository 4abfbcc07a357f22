# %% [markdown]
# # Expected Attention: the queries that have not come yet
#
# **The attention that matters is that of the questions to come. Can it be computed before they are asked?**
#
# Expected Attention ([arXiv 2510.00636](https://arxiv.org/abs/2510.00636)) models future queries as Gaussian. For a Gaussian
# query the expectation of an unnormalised weight has a closed form.

# %% tags=["setup"]
import numpy as np
import torch
from matplotlib import pyplot as plt

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cache.future_queries import future_statistics
from evictionary.evaluation import passkey
from evictionary.evaluation.questions import prefill
from evictionary.reference import expected_attention as ea
from evictionary.reference.attention import softmax
from evictionary.reference.expected_attention_theory import correlation
from evictionary.spec_tests.harness.planted import load_mutants
from tutorials.lesson import BLUE, GREY, ORANGE, embedded, report, show

# %% [markdown]
# ## Two keys, by hand
#
# Let queries and keys be single numbers, and the query drawn from N(0, 1), the Gaussian of mean 0 and variance 1. Key A is 0,
# key B is 2. The unnormalised weight, a weight of attention before it is divided by the sum of all, is $z=e^{qk}$. For key A it
# is always 1. For key B it is $e^{2q}$: above 1 for half of the queries, below 1 for the other half.
#
# **Predict** On average over the queries: is the mean of $e^{2q}$ about 1, about 2, or about 7?

# %% tags=["predict"]
random = np.random.default_rng(0)
queries = random.normal(size=200_000)
print("mean of exp(2q)", np.exp(2 * queries).mean().round(2))
print("exp(2^2 / 2)   ", np.exp(2.0).round(2))

# %% tags=["drawing"] alt="Distribution of exp(2q): most of it below 1, a long tail, the mean at 7.4"
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.hist(np.exp(2 * queries), bins=np.linspace(0, 20, 80), color=BLUE)
axes.axvline(1, color=GREY, linestyle=":", label="median, 1")
axes.axvline(np.exp(2), color=ORANGE, label="mean, e² = 7.4")
axes.set(xlabel="weight exp(2q) of key B before normalising", ylabel="queries")
axes.legend()
plt.show()

# %% [markdown]
# The mean is the moment generating function of a Gaussian of mean $\mu$ and variance $\sigma^2$:
# $E[e^{qk}]=e^{\mu k+\sigma^2k^2/2}$. Rare queries that love the key decide. In $d$ channels the mean is a vector $\mu$, the
# variance a covariance matrix $\Sigma$, and logits are divided by $\sqrt d$. This is the heart of the method, the expected
# unnormalised weight of token $i$ (EA-7), and its share of all tokens (EA-8):
#
# $$\hat z_i=\exp\Big(\frac{\mu\cdot k_i}{\sqrt d}+\frac{k_i^\top\Sigma k_i}{2d}\Big),
# \qquad\hat a_i=\frac{\hat z_i}{\sum_j\hat z_j}.$$
#
# The code keeps the logarithm of $\hat z$, since $\hat z$ itself overflows.

# %%
show(ea.log_expected_scores, ea.expected_weights)

# %% [markdown]
# Against sampled queries, in eight dimensions:

# %% alt="Sampled mean against formula for 30 keys on logarithmic axes: all on the diagonal"
head_dim = 8
mean = random.normal(size=head_dim) / 2
root = random.normal(size=(head_dim, head_dim)) / 2
covariance = root @ root.T
keys = random.normal(size=(30, head_dim))
drawn = mean + random.normal(size=(100_000, head_dim)) @ root.T
sampled = np.exp(drawn @ keys.T / np.sqrt(head_dim)).mean(axis=0)
formula = np.exp(ea.log_expected_scores(keys, mean, covariance))
print("largest relative difference", np.abs(sampled / formula - 1).max().round(3))
figure, axes = plt.subplots(figsize=(3.6, 3.2))
axes.loglog(formula, sampled, "o", color=BLUE, markersize=4)
axes.loglog(axes.get_xlim(), axes.get_xlim(), color=GREY, linestyle=":")
axes.set(xlabel="EA-7", ylabel="mean over 100,000 queries")
plt.show()

# %% [markdown]
# ## From weight to score (EA-9)
#
# [Lesson 1](01_kv_cache.md) showed that the value counts too. The score is $(\hat a_i+\epsilon)\,|v_i|$, the expected weight
# plus a small constant, times the length of the value. The paper sets $\epsilon$ to .02.
#
# **Predict** The weights $\hat a$ of a head sum to 1. Of 4,096 tokens, how many can at most have a weight above .02? And who
# decides for the others?

# %% tags=["predict"]
show(ea.contribution)
print("at most", int(1 / 0.02), "tokens; for the others the score lies between .02 |v| and .04 |v|")

# %% [markdown]
# So with the published $\epsilon$ the norm of the value ranks nearly everything (it has an
# [erratum](../errata.md#ea-9-epsilon-002-is-not-small)). The paper itself sets it to 0 where one hidden fact, a *needle*, has
# to be found.
#
# ## The positions to come (EA-6)
#
# Most models tell a token's position to the attention by turning its query and key: RoPE, rotary position embedding, turns each
# pair of channels by an angle that grows with the position, each pair with its own speed. The future has many positions, so the
# method averages the rotation over the next 512; a fast pair is averaged away. The averaged rotation turns the mean and the
# covariance of the queries, which are taken *before* RoPE; keys are cached *after* it.
#
# **Predict** The average of a full turn is 0. How many of the 32 pairs of a 64-channel head keep more than half of their length?

# %% tags=["predict"] alt="How much of each pair of channels survives the average over 512 positions: fast pairs vanish"
average = ea.average_rotation(64, position=1500, horizon=512)
survives = np.hypot(np.diag(average)[:32], np.diag(average[32:, :32]))
print((survives > 0.5).sum(), "pairs")
figure, axes = plt.subplots(figsize=(6, 2.4))
axes.bar(range(32), survives, color=BLUE)
axes.set(xlabel="pair of channels, from the fastest to the slowest", ylabel="length left")
plt.show()

# %% [markdown]
# ## What goes wrong: a half
#
# In $e^{\mu k+\sigma^2k^2/2}$ the half is easily lost. Take two keys that draw the same expected weight by EA-7.
#
# **Predict** Which way does the ranking tip without the half?

# %% tags=["predict"]
half_dropped = load_mutants()["expected_attention.half_dropped"]
print("planted:", half_dropped.misconception, "- to be caught by", half_dropped.killed_by)
level = np.array([[2.0], [-1.0]])  # the logits' log expectations: -.5 * 2 + 2^2 / 2 = 1, and .5 + 1 / 2 = 1
mu, one = np.array([-0.5]), np.eye(1)
print("keys", level[:, 0], "right", ea.log_expected_scores(level, mu, one), "mutant", half_dropped.function(level, mu, one))

# %% tags=["drawing"] alt="Logarithm of the expected weight against the key: two parabolas; without the half one too steep"
figure, axes = plt.subplots(figsize=(5.6, 2.6))
line = np.linspace(-2, 3, 101)[:, None]
axes.plot(line, ea.log_expected_scores(line, mu, one), color=BLUE, label="EA-7")
axes.plot(line, half_dropped.function(line, mu, one), color=ORANGE, label="without the half")
for key in level[:, 0]:
    axes.axvline(key, color=GREY, linestyle=":")
axes.set(xlabel="key (dotted: the two of the example)", ylabel="log of the expected weight")
axes.legend()
plt.show()

# %% [markdown]
# Without the half the longer key wins, though both draw the same: the variance counts double.

# %% [markdown]
# ## A real model
#
# SmolLM2 reads a text and a question. From the queries of the *text* alone we take mean and covariance, before RoPE, and
# average over the coming positions (`future_statistics`). Then we compare the expected weights with the attention that the
# question really pays to the text, in all 30 layers and 9 query heads; three query heads share a KV head, hence the `group` of
# 3.

# %%
model, tokenizer = embedded()
prompt = passkey.make(tokenizer, depth=0.3, tokens=300)
length = prompt.context_ids.shape[1]
cache = EvictingCache(model, method=None, record=("queries",))
prefill(model, torch.cat([prompt.context_ids, prompt.question_ids], dim=1), cache)

group = 3
expected, mean_alone, observed = [], [], []
for index, layer in enumerate(cache.layers):
    queries = cache.recorded[index]["queries"]
    statistics = future_statistics(model, index, queries[:, :, :length], torch.arange(length), length)
    mean, covariance = (each[0].double().numpy() for each in statistics)
    keys = np.repeat(layer.keys[0, :, :length].double().numpy(), group, axis=0)
    coming = queries[0, :, length:].double().numpy()
    expected.append(ea.expected_weights(keys, mean, covariance))
    mean_alone.append(ea.expected_weights(keys, mean, 0 * covariance))
    observed.append(softmax(coming @ keys.swapaxes(-1, -2) / np.sqrt(keys.shape[-1])).mean(axis=-2))
expected, mean_alone, observed = (np.array(each) for each in (expected, mean_alone, observed))

# %% [markdown]
# **Predict** A correlation of 1 would be a perfect forecast. Does the variance term help, beside a forecast by the mean query
# alone?

# %% tags=["predict"] alt="Correlation of expected with observed attention in each layer, with and without the variance"
with_variance, without = correlation(observed, expected), correlation(observed, mean_alone)
print(
    "mean over layers and heads, first token included:",
    with_variance.mean().round(2),
    "and by the mean alone",
    without.mean().round(2),
)
rest_with = correlation(observed[..., 4:], expected[..., 4:])
rest_without = correlation(observed[..., 4:], mean_alone[..., 4:])
print(
    "without the first 4 tokens:                      ",
    rest_with.mean().round(2),
    "and by the mean alone",
    rest_without.mean().round(2),
)
figure, axes = plt.subplots(figsize=(6.6, 2.8))
axes.plot(rest_with.mean(axis=-1), color=BLUE, marker=".", label="EA-8")
axes.plot(rest_without.mean(axis=-1), color=ORANGE, marker=".", label="the mean query alone")
axes.set(xlabel="layer", ylabel="correlation", title="expected and observed attention, the first 4 tokens left out")
axes.legend()
plt.show()

# %% [markdown]
# The first token of a text draws much of the attention (it is an attention *sink*), and any forecast gets that right. So the
# honest figure is the one without the first tokens. The forecast is good in the early layers and mixed in the later ones, and
# on this prompt the variance term does not improve it. There is a reason why it may do too much: a ratio of expectations
# rewards variance more than expected attention would (EA-8; [lesson 10](10_reading_a_paper.md) has the example). One prompt and
# one small model say no more than that; the paper's own measure is its appendix C.
#
# ## Exercises
#
# **1.** Write EA-7 for one dimension, in the log domain: the query is N(mean, variance), the logit is $qk$.


# %%
def log_expected_weight(key, mean, variance):
    raise NotImplementedError


# %%
def check_log_expected_weight(attempt):
    for key, mean, variance in ((2.0, 0.0, 1.0), (-1.0, 3.0, 0.5), (100.0, 1.0, 2.0)):
        wanted = ea.log_expected_scores(np.array([[key]]), np.array([mean]), np.array([[variance]]))[0]
        assert np.isclose(attempt(key, mean, variance), wanted), f"key {key}: wanted {wanted}"


report(check_log_expected_weight, log_expected_weight)


# %% tags=["solution"]
def solution_log_expected_weight(key, mean, variance):
    return mean * key + variance * key**2 / 2


report(check_log_expected_weight, solution_log_expected_weight)

# %% [markdown]
# **2.** Two tokens have the expected weights .03 and .003, and the second one's value is twice as long. Find the $\epsilon$ with
# which both score the same.

# %%
epsilon = 0.02


# %%
def check_epsilon(attempt):
    first = ea.contribution(np.array([0.03]), np.array([[1.0]]), attempt)
    second = ea.contribution(np.array([0.003]), np.array([[2.0]]), attempt)
    assert np.isclose(first, second).all(), f"the scores are {first[0]:.4f} and {second[0]:.4f}"


report(check_epsilon, epsilon)

# %% tags=["solution"]
solution_epsilon = 0.03 - 2 * 0.003  # .03 + e = 2 (.003 + e)
report(check_epsilon, solution_epsilon)

# %% [markdown]
# More: [all equations of Expected Attention](../methods/expected_attention.md) and the [steps between
# them](../methods/derivations.md). Next: [lesson 5, MomentKV](05_momentkv.md), which asks what becomes of the evicted.
