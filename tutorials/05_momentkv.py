# %% [markdown]
# # MomentKV: remember the evicted by four sums
#
# **When tokens are evicted, must everything about them be lost?**
#
# MomentKV ([arXiv 2606.01563](https://arxiv.org/abs/2606.01563)) adds what it evicts to four sums, whose size does not grow, and
# gives the evicted tokens' share of the attention back from them.

# %% tags=["setup"]
import numpy as np
import torch
from matplotlib import pyplot as plt

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.evaluation import passkey
from evictionary.evaluation.questions import ask, prefill
from evictionary.reference import keydiff, momentkv
from evictionary.reference import momentkv_theory as theory
from evictionary.reference.selection import top_k
from evictionary.spec_tests.harness.planted import load_mutants
from tutorials.lesson import BLUE, ORANGE, embedded, report, show

# %% [markdown]
# ## Three tokens, by hand
#
# One dimension. The query is 1. Token 0 stays: key 0, value 4. Tokens 1 and 2 go: both have key 0, their values are 1 and 3. All
# weights are 1/3, so the output is 8/3.
#
# Evict and forget: the output is 4. Evict and remember $n=2$, $\sum v=4$: the evicted pair has weight 2/3 and mean value 2, so
# $\tfrac13\cdot4+\tfrac23\cdot2=8/3$. Nothing is lost.
#
# **Predict** The two evicted keys are equal here. Is that what makes it exact, or that they are 0?


# %% tags=["predict"]
def three_outputs(query, keys, values, kept):
    """The full output, that of the kept tokens alone, and the corrected one; query [D], keys [T, D], values [T, D_v], kept [T]."""
    moments = momentkv.update(momentkv.no_moments(keys[None], values[None]), keys[None], values[None], ~kept[None])
    moments = momentkv.Moments(*(np.asarray(field)[None] for field in moments))
    arguments = (query[None, None], keys[None, None], values[None, None], kept[None, None])
    corrected = momentkv.attend(*arguments, moments)[0, 0]
    return theory.full_output(query, keys, values), theory.sub_outputs(query, keys, values, kept)[0], corrected


values = np.array([[4.0], [1.0], [3.0]])
kept = np.array([True, False, False])
outputs = {}
for keys in ([[0.0], [0.0], [0.0]], [[0.0], [2.0], [2.0]], [[0.0], [1.0], [2.0]]):
    full, retained, corrected = three_outputs(np.array([1.0]), np.array(keys), values, kept)
    print("keys", np.ravel(keys), f"full {full[0]:.3f}, kept alone {retained[0]:.3f}, corrected {corrected[0]:.3f}")
    outputs[f"keys {np.ravel(keys).astype(int)}"] = (full[0], retained[0], corrected[0])

# %% tags=["drawing"] alt="Three rows of outputs: the kept token alone is far off; the corrected one is near the full one"
figure, axes = plt.subplots(figsize=(6.4, 2.2))
rows = np.array(list(outputs.values()))
for column, (name, marker, colour) in enumerate((("full", "o", "black"), ("kept alone", "s", ORANGE), ("corrected", "x", BLUE))):
    axes.plot(rows[:, column], range(3), marker, color=colour, markersize=9, label=name)
axes.set(xlabel="output", yticks=range(3), yticklabels=list(outputs), xlim=(1.9, 4.2), ylim=(2.5, -0.5))
axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
plt.show()

# %% [markdown]
# Equal keys are what counts: then all evicted tokens get the same weight, whatever the query. Where they differ, the sums know
# the weights only approximately.
#
# ## Four sums (MK-22 to MK-25)
#
# Of the set $E$ of evicted tokens MomentKV keeps four sums, its *moments* (MK-22), and adds each token that goes later (MK-25):
#
# $$n=|E|,\qquad s_k=\sum_{i\in E}k_i,\qquad s_v=\sum_{i\in E}v_i,\qquad S=\sum_{i\in E}v_ik_i^\top.$$
#
# From them follow (MK-23, MK-24) the mean key $\bar k=s_k/n$, the mean value $\bar v=s_v/n$, and $\tilde S=S-s_vs_k^\top/n$,
# which says how values vary with keys.

# %%
show(momentkv.Moments, momentkv.update, momentkv.recover)

# %% [markdown]
# What are they good for? Call the sum of exponentials that a softmax divides by its *partition function* $Z$. Attention over
# the retained tokens alone has the output $f_R$ and the partition function $Z_R$, attention over the evicted ones $f_E$ and
# $Z_E$, and the attention over all is the mean of $f_R$ and $f_E$ with the weights $Z_R$ and $Z_E$. With the evicted
# tokens $f_E$ and $Z_E$ are gone, but the moments give an estimate of each (MK-9, MK-11), and both are mixed in as if they were
# one more token (MK-12):
#
# $$\hat f_E=\bar v+\frac{\tilde Sq}{n\sqrt d},\qquad\hat Z_E=n\,e^{q\cdot\bar k/\sqrt d},\qquad\hat f=\frac{Z_Rf_R+\hat Z_E\hat
# f_E}{Z_R+\hat Z_E}.$$
#
# A query that prefers some keys prefers their values: that is the linear term. It is exact to first order in the spread of the
# logits, that is, as long as the evicted logits differ little.

# %%
show(momentkv.approximate_evicted, momentkv.log_evicted_partition, momentkv.attend)

# %% tags=["drawing"] alt="Output of three evicted tokens against the query: a curve between the values, and its straight estimate"
gone_keys, gone_values = np.array([[-1.0], [0.2], [1.2]]), np.array([[1.0], [3.0], [2.0]])
gone = momentkv.update(momentkv.no_moments(gone_keys, gone_values), gone_keys, gone_values, np.ones(3, dtype=bool))
line = np.linspace(-4, 4, 81)
figure, axes = plt.subplots(figsize=(5.8, 2.8))
axes.plot(line, [theory.full_output(np.array([q]), gone_keys, gone_values)[0] for q in line], color="black", label="$f_E$, exact")
axes.plot(line, [momentkv.approximate_evicted(np.array([q]), gone)[0] for q in line], color=BLUE, label=r"$\hat f_E$ (MK-9)")
axes.set(xlabel="query", ylabel="output", title="three evicted tokens: keys -1, 0.2, 1.2, values 1, 3, 2")
axes.legend()
plt.show()

# %% [markdown]
# Near the query 0 the line is the tangent of the curve. Far away the curve ends at the value of one token, and the line goes on.
#
# ## How good is first order?
#
# Evict 20 random tokens and let the spread of their keys grow.
#
# **Predict** The approximation drops terms of second order. If the spread is halved, by which factor does its error fall?

# %% tags=["predict"] alt="Error of the evicted output against the spread of the keys, log-log: slopes 1 and 2"
random = np.random.default_rng(0)
query, directions, values = random.normal(size=8), random.normal(size=(20, 8)), random.normal(size=(20, 8))
values = values + directions  # values that go with their keys, so that the linear term has something to say
spreads = 2.0 ** np.arange(-6, 2)
errors = {"mean value alone": [], "with S (MK-9)": []}
for spread in spreads:
    keys = spread * directions
    gone = np.ones(20, dtype=bool)
    moments = momentkv.update(momentkv.no_moments(keys, values), keys, values, gone)
    exact = theory.full_output(query, keys, values)
    errors["mean value alone"].append(np.linalg.norm(exact - values.mean(axis=0)))
    errors["with S (MK-9)"].append(np.linalg.norm(exact - momentkv.approximate_evicted(query, moments)))
print(
    "error with S at each halving:",
    [f"{a / b:.1f}" for a, b in zip(errors["with S (MK-9)"][1:5], errors["with S (MK-9)"][:4], strict=True)],
)
figure, axes = plt.subplots(figsize=(5.4, 3))
for (name, error), colour in zip(errors.items(), (ORANGE, BLUE), strict=True):
    axes.loglog(spreads, error, marker="o", color=colour, label=name)
axes.set(xlabel="spread of the evicted keys", ylabel="error of the evicted output")
axes.legend()
plt.show()

# %% [markdown]
# ## Where it hurts (MK-36)
#
# The paper says the corrected output is always at least as accurate as the kept tokens alone, because the weight of the
# correction vanishes by itself when the spread grows. Try it: keep key 0 with value 1; evict keys $\pm s$ with values $\pm1$;
# the query is 1.
#
# **Predict** The mean of the two evicted keys is 0 for every $s$. What then is the weight of the correction at $s=8$?

# %% tags=["predict"]
for s in (0.5, 2.0, 8.0):
    keys, some_values = np.array([[0.0], [s], [-s]]), np.array([[1.0], [1.0], [-1.0]])
    full, retained, corrected = three_outputs(np.array([1.0]), keys, some_values, kept)
    print(f"s = {s}: full {full[0]:.4f}   error alone {abs(full - retained)[0]:.1e}   corrected {abs(full - corrected)[0]:.2f}")

# %% tags=["drawing"] alt="Error against the spread s: that of the kept token alone falls, the corrected one grows"
spread = np.linspace(0.02, 8, 200)
found = [three_outputs(np.array([1.0]), np.array([[0.0], [s], [-s]]), np.array([[1.0], [1.0], [-1.0]]), kept) for s in spread]
figure, axes = plt.subplots(figsize=(5.6, 2.6))
axes.semilogy(spread, [abs(full - retained)[0] for full, retained, _ in found], color=ORANGE, label="kept token alone")
axes.semilogy(spread, [abs(full - corrected)[0] for full, _, corrected in found], color=BLUE, label="corrected")
axes.set(xlabel="spread s of the evicted keys", ylabel="error")
axes.legend()
plt.show()

# %% [markdown]
# The weight stays 2/3 and the linear term grows with $s$: the correction does harm. The
# [erratum](../errata.md#mk-36-the-correction-can-be-worse-than-none) has the condition under which it helps.
#
# ## What goes wrong: sums in half precision
#
# Sums are harmless in exact arithmetic. In float16 a number above 2,048 no longer notices that 1 is added.
#
# **Predict** Evict 3,000 equal tokens with key 1, one by one. What does a float16 sum of the keys say?

# %% tags=["predict"]
in_float16 = load_mutants()["momentkv.moments_in_float16"]
print("planted:", in_float16.misconception, "- to be caught by", in_float16.killed_by)
one = np.ones((1, 1, 1, 1))
right = wrong = momentkv.no_moments(one, one)
for _ in range(3000):
    right = momentkv.update(right, one, one, np.ones((1, 1, 1), dtype=bool))
    wrong = in_float16.function(wrong, one, one, np.ones((1, 1, 1), dtype=bool))
print("right", right.key_sum.item(), "  mutant", wrong.key_sum.item())

# %% [markdown]
# ## A real model
#
# Half of the cache goes by KeyDiff. For the last token of the question, in every layer: how far is the attention output off,
# with and without the correction? Everything comes from the queries, keys and values of one forward pass.

# %%
model, tokenizer = embedded()
prompt = passkey.make(tokenizer, depth=0.3, tokens=300)
recorded = EvictingCache(model, method=None, record=("queries",))
prefill(model, torch.cat([prompt.context_ids, prompt.question_ids], dim=1), recorded)

alone, corrected_error = [], []
for index, layer in enumerate(recorded.layers):
    query = recorded.recorded[index]["queries"][:, :, -1].double().numpy()
    keys, values = layer.keys.double().numpy(), layer.values.double().numpy()
    kept = top_k(keydiff.score(keys), keys.shape[2] // 2)
    none = momentkv.no_moments(keys, values)
    full = momentkv.attend(query, keys, values, np.ones_like(kept), none)
    size = np.linalg.norm(full, axis=-1)
    alone.append(np.linalg.norm(momentkv.attend(query, keys, values, kept, none) - full, axis=-1) / size)
    moments = momentkv.update(none, keys, values, ~kept)
    corrected_error.append(np.linalg.norm(momentkv.attend(query, keys, values, kept, moments) - full, axis=-1) / size)
alone, corrected_error = np.array(alone)[:, 0], np.array(corrected_error)[:, 0]

# %% [markdown]
# **Predict** There are 30 layers of 9 query heads. In how many of the 270 does the correction help?

# %% tags=["predict"] alt="Relative error of the attention output in each layer, kept tokens alone and corrected"
print("the correction helps in", (corrected_error < alone).sum(), "of", alone.size, "heads")
print(f"median relative error {np.median(alone):.3f} alone, {np.median(corrected_error):.3f} corrected")
figure, axes = plt.subplots(figsize=(6.6, 2.8))
axes.plot(np.median(alone, axis=-1), color=ORANGE, marker=".", label="kept tokens alone")
axes.plot(np.median(corrected_error, axis=-1), color=BLUE, marker=".", label="corrected (MK-12)")
axes.set(xlabel="layer", ylabel="relative error", title="median over the query heads, half evicted by KeyDiff")
axes.legend()
plt.show()

# %% [markdown]
# In [a real model](../in_a_model.md) the correction goes with any method: write `+moments` behind its name.

# %%
context = EvictingCache(model, method=None)
prefill(model, prompt.context_ids, context)
baseline = ask(model, tokenizer, context, prompt.question_ids, 10)
for method in ("streaming_llm", "streaming_llm+moments", "keydiff", "keydiff+moments"):
    cache = EvictingCache.from_prefilled(model, context, method, 0.5)
    answer = ask(model, tokenizer, cache, prompt.question_ids, 10)
    distance = torch.linalg.norm(answer.hidden_states - baseline.hidden_states).item()
    print(f"{method:22} {answer.text!r:14} distance of the hidden states {distance:.1f}")

# %% [markdown]
# Moments bring the hidden states nearer to those of the full cache. But a number that is gone stays gone: a mean of values is no
# seven digits. And one query of one prompt, after the half that KeyDiff chose, is a friendly case: KeyDiff evicts keys that are
# alike, and there first order is good. MK-36 above was not friendly. [Five prompts and three ratios](../retrieval.md) say more.
#
# ## Exercises
#
# **1.** Write MK-25 for one head: add one evicted token (key `[D]`, value `[D_v]`) to the four sums, given as a tuple.


# %%
def add_evicted(moments, key, value):
    raise NotImplementedError


# %%
def check_add_evicted(attempt):
    some_keys, some_values = random.normal(size=(5, 3)), random.normal(size=(5, 2))
    sums = tuple(momentkv.no_moments(some_keys, some_values))
    for key, value in zip(some_keys, some_values, strict=True):
        sums = attempt(sums, key, value)
    none = momentkv.no_moments(some_keys, some_values)
    wanted = momentkv.update(none, some_keys, some_values, np.ones(5, dtype=bool))
    for name, got, right in zip(wanted._fields, sums, wanted, strict=True):
        assert np.shape(got) == np.shape(right), f"{name}: got shape {np.shape(got)}, wanted {np.shape(right)}"
        assert np.allclose(got, right), f"{name} is wrong"


report(check_add_evicted, add_evicted)


# %% tags=["solution"]
def solution_add_evicted(moments, key, value):
    count, key_sum, value_sum, value_key_sum = moments
    return count + 1, key_sum + key, value_sum + value, value_key_sum + np.outer(value, key)


report(check_add_evicted, solution_add_evicted)

# %% [markdown]
# **2.** The moments of one head with $d$ channels are $d^2+2d$ numbers, whatever was evicted. As many numbers hold how many
# tokens' keys and values? Write it as a function of $d$, and compare the paper's figure of about 128 tokens at $d=128$.


# %%
def tokens_worth(head_dim):
    raise NotImplementedError


# %%
def check_tokens_worth(attempt):
    for head_dim in (64, 128):
        wanted = theory.numbers_stored(head_dim) / (2 * head_dim)
        assert attempt(head_dim) == wanted, f"head_dim {head_dim}: wanted {wanted}; a token has a key and a value"


report(check_tokens_worth, tokens_worth)


# %% tags=["solution"]
def solution_tokens_worth(head_dim):
    return (head_dim**2 + 2 * head_dim) / (2 * head_dim)  # (d + 2) / 2: 65 tokens at d = 128, half of what the paper says


report(check_tokens_worth, solution_tokens_worth)

# %% [markdown]
# More: [move the query](../figures/moments.md) and look for one where the correction hurts; [all equations of
# MomentKV](../methods/momentkv.md). Next: [lesson 6, GVote](06_gvote.md), which finds its budget by itself; or [lesson
# 7](07_geometry_of_eviction.md), which draws this one.
