# %% [markdown]
# # The KV cache and what eviction loses
#
# **A language model stores a key and a value for every token it has read. What breaks when it throws half of them away?**
#
# You need NumPy and have heard of transformers. In each layer a transformer makes three vectors of every token: a *query*, which
# asks, a *key*, by which it is found, and a *value*, which it hands over. The query of a token is compared with the keys of all
# tokens so far. The dot products, divided by $\sqrt D$, are the *logits*; softmax, which divides exponentials by their sum, makes
# them *weights* that sum to 1; the output is the weighted mean of the values:
#
# $$\mathrm{output}=\sum_{i=1}^{T}a_iv_i,\qquad a_i=\frac{e^{q\cdot k_i/\sqrt D}}{\sum_j e^{q\cdot k_j/\sqrt D}}.$$
#
# $T$ is the number of tokens and $D$ the number of channels of a key. A token is a word or a piece of one.
#
# All lessons: a box with a file name is quoted from the project as it is tested there (`show` prints it). A name such as KD-3
# is an equation, here the third of the KeyDiff paper, and leads to all that the project knows of it; EA, LK, MK and GV are the
# other papers, ATT, SEL and CACHE the rules that they share.

# %% tags=["setup"]
import numpy as np
from matplotlib import pyplot as plt

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.evaluation import passkey
from evictionary.evaluation.questions import ask, prefill
from evictionary.reference.attention import attention, softmax
from evictionary.reference.cache import compress
from evictionary.reference.keydiff import Cache
from evictionary.reference.keydiff_theory import cached_attention, causal_attention
from evictionary.reference.selection import budget, top_k
from evictionary.spec_tests.harness.planted import load_mutants
from tutorials.lesson import BLUE, GREEN, GREY, ORANGE, draw_kept, embedded, report, show

# %% [markdown]
# ## Three tokens, by hand
#
# Let everything be a single number, $D=1$. The query is 1, so the logits are the keys themselves. Take the keys $\log 5$,
# $\log 3$ and $\log 2$: the weights are then .5, .3 and .2. The values are 1, 2 and $-\tfrac12$. The output is
# $.5\cdot 1+.3\cdot 2+.2\cdot(-\tfrac12)=1$.

# %%
keys = np.log([[5.0], [3.0], [2.0]])
values = np.array([[1.0], [2.0], [-0.5]])
query = np.array([[1.0]])

print("weights", softmax(query @ keys.T).round(3))
print("output ", attention(query, keys, values))
show(attention)

# %% [markdown]
# Eviction removes a token from the cache. The weights of the others are normalised again, since a softmax always sums to 1.
#
# **Predict** Which token can go with the least damage: the one with weight .5, .3 or .2?

# %% tags=["predict"]
full = attention(query, keys, values).item()
damage = []
for token in range(3):
    kept = np.arange(3) != token
    without = attention(query, keys[kept], values[kept]).item()
    damage.append(abs(without - full))
    print(f"without token {token}: output {without:.3f}, off by {damage[-1]:.3f}")

# %% [markdown]
# The heaviest token goes for free: its value is exactly the output, so the others say the same without it. The lightest costs
# nearly as much as any. A weight alone does not tell what a token is worth: it also counts how the value differs from what the
# others say. One of the papers calls weight times length of the value the best measure there is; this example is the
# [erratum EA-4](../errata.md#ea-4-the-size-of-an-update-is-not-the-optimal-measure).

# %% tags=["drawing"] alt="Bars of attention weight and of damage for three tokens: the heaviest token does no damage"
figure, (left, right) = plt.subplots(1, 2)
left.bar(range(3), [0.5, 0.3, 0.2], color=BLUE)
left.set(title="attention weight", xlabel="token", xticks=range(3))
right.bar(range(3), damage, color=ORANGE)
right.set(title="error when it is evicted", xlabel="token", xticks=range(3))
plt.show()

# %% [markdown]
# ## Why there is a cache at all
#
# A model writes one token at a time. The keys and values of earlier tokens do not change when a token is added, so they are
# stored. Attention with a cache gives exactly what attention over everything gives (KD-3): here the last of six tokens, once
# with all queries at once and once alone with a cache of five.

# %%
random = np.random.default_rng(0)
queries, many_keys, many_values = random.normal(size=(3, 6, 4))
at_once = causal_attention(queries, many_keys, many_values)[-1]
cache = Cache(many_keys[:5], many_values[:5], np.arange(5), 5)
one_by_one = cached_attention(queries[5:], many_keys[5:], many_values[5:], cache)[0]
print("largest difference", np.abs(at_once - one_by_one).max())
show(cached_attention)

# %% [markdown]
# The price is memory. Each layer has several *heads*, attentions side by side, and in most models a few query heads share the
# keys and values of one *KV head*. So what is stored is two vectors, key and value, of `head_dim` numbers ($D$ above) for each
# token, each KV head and each layer.
#
# **Predict** Llama-3.1-8B has 32 layers, 8 KV heads, head_dim 128 and stores 2 bytes a number. How many tokens fill a 24 GiB
# card with their cache alone, the weights not counted?

# %% tags=["predict"]
bytes_of_a_token = 2 * 32 * 8 * 128 * 2
print(f"{bytes_of_a_token // 1024} KiB a token, so {24 * 2**30 // bytes_of_a_token:,} tokens")

# %% tags=["drawing"] alt="Size of the KV cache against the number of tokens, whole, half, a tenth: straight lines"
tokens = np.linspace(0, 200_000, 50)
for removed, colour in ((0, BLUE), (0.5, ORANGE), (0.9, GREEN)):
    plt.plot(tokens / 1000, (1 - removed) * tokens * bytes_of_a_token / 2**30, color=colour, label=f"{removed:.0%} removed")
plt.axhline(24, color=GREY, linestyle=":")
plt.gca().set(xlabel="thousand tokens", ylabel="KV cache (GiB)", title="Llama-3.1-8B, 2 bytes a number")
plt.legend()
plt.show()

# %% [markdown]
# ## Choose, then gather
#
# Most methods here work in the same steps: give each token a score (higher = keep), keep as many as the *budget* allows, and
# copy the kept rows together. The budget comes from a compression ratio, the fraction that is *removed*. The shapes are those
# of transformers: keys and values are `[batch, KV heads, tokens, head_dim]`.

# %%
scores = np.array([[[0.1, 0.9, 0.3, 0.9, 0.2]]])
kept = top_k(scores, budget(5, compression_ratio=0.4))
print("kept", kept[0, 0].astype(int))
compressed = compress(random.normal(size=(1, 1, 5, 2)), random.normal(size=(1, 1, 5, 2)), kept)
print("positions", compressed.positions, "keys", compressed.keys.shape)

# %% tags=["drawing"] alt="Scores of five tokens as bars: the three that are kept are blue, the other two grey"
figure, axes = plt.subplots(figsize=(5, 2))
axes.bar(range(5), scores[0, 0], color=[BLUE if stays else GREY for stays in kept[0, 0]])
axes.set(xlabel="token", ylabel="score", title="budget 3 of 5: blue stays, in the order of the text")
plt.show()

# %% [markdown]
# The tokens stay in the order of the text, and of equal scores the lower position is kept. Such choices are written down on the
# [page of decisions](../decisions.md).
#
# ## What goes wrong: a budget
#
# **Predict** What is `int(10 * (1 - 0.9))`?

# %% tags=["predict"]
print("naive   ", int(10 * (1 - 0.9)))
print("in here ", budget(10, 0.9))
show(budget)

# %% [markdown]
# $1-0.9$ is a little less than a tenth in binary, and `int` cuts off. The slip is planted in this project as a *mutant*, a
# wrong implementation that the *laws* must catch: properties that every right one has, tested on drawn inputs. How many budgets
# does it get wrong?

# %%
wrong_budget = load_mutants()["selection.float_budget"]
print("planted:", wrong_budget.misconception)
ratios = [percent / 100 for percent in range(1, 100)]
wrong = [
    (length, ratio)
    for length in (10, 100, 1000)
    for ratio in ratios
    if wrong_budget.function(length, ratio) != budget(length, ratio)
]
print(f"{len(wrong)} of {3 * len(ratios)} budgets are wrong, such as", wrong[:4])

# %% [markdown]
# ## A real model
#
# SmolLM2-135M, a language model of 135 million parameters, reads a few hundred tokens with a number hidden among them
# (`prefill`). Then its cache is compressed, and only then is it asked for the number. The method cannot know what will be
# asked.

# %%
model, tokenizer = embedded()
prompt = passkey.make(tokenizer, depth=0.3, tokens=300)
print(tokenizer.decode(prompt.context_ids[0, prompt.needle[0] - 12 : prompt.needle[1] + 12]))

full_cache = EvictingCache(model, method=None)
prefill(model, prompt.context_ids, full_cache)

# %% [markdown]
# **Predict** Half of the tokens go: at random, all but the first and the most recent (`streaming_llm`), or by KeyDiff, which
# looks at the directions of the keys. Which of the three caches still knows the number?

# %% tags=["predict"]
caches = {}
print("the number is", prompt.answer)
for method in (None, "random", "streaming_llm", "keydiff"):
    caches[method] = EvictingCache.from_prefilled(model, full_cache, method, 0.5)
    answer = ask(model, tokenizer, caches[method], prompt.question_ids, 10)
    print(f"{method or 'full cache':14} {caches[method].nbytes / 2**20:5.1f} MiB  {answer.text!r}")

# %% tags=["drawing"] alt="Which tokens two methods keep in each layer and head: StreamingLLM the ends, KeyDiff some everywhere"
figure, axes = plt.subplots(2, 1, figsize=(6.4, 4.6), sharex=True)
for each, method in zip(axes, ("streaming_llm", "keydiff"), strict=True):
    draw_kept(each, caches[method], prompt.needle, f"{method}: blue is kept, the number stands between the lines")
axes[0].set_xlabel("")
plt.show()

# %% [markdown]
# The model has 30 layers of 3 KV heads, so the picture has 90 rows, and each row keeps half of its tokens. One prompt is no
# measurement: [a table](../methods/index.md#what-a-small-model-shows) has five prompts and three ratios. But the picture shows
# what the following lessons are about: each method has its own idea of what to colour. In [a figure](../figures/survivors.md)
# you can move the budget and put all methods side by side.
#
# ## Exercises
#
# **1.** How many bytes does a KV cache take?


# %%
def cache_bytes(layers, kv_heads, head_dim, tokens, bytes_of_a_number):
    raise NotImplementedError


# %%
def check_cache_bytes(attempt):
    held = full_cache.nbytes
    assert attempt(30, 3, 64, full_cache.get_seq_length(), 4) == held, f"SmolLM2 holds {held} bytes in float32 here"
    assert attempt(32, 8, 128, 1, 2) == bytes_of_a_token, "Llama-3.1-8B takes 128 KiB a token"


report(check_cache_bytes, cache_bytes)


# %% tags=["solution"]
def solution_cache_bytes(layers, kv_heads, head_dim, tokens, bytes_of_a_number):
    return 2 * layers * kv_heads * head_dim * tokens * bytes_of_a_number


report(check_cache_bytes, solution_cache_bytes)

# %% [markdown]
# **2.** From weights and values alone, without a key or a query: the output after token `i` has been evicted.


# %%
def output_without(weights, values, i):
    raise NotImplementedError


# %%
def check_output_without(attempt):
    some_keys, some_values = random.normal(size=(2, 7, 3))
    some_query = random.normal(size=(1, 3))
    weights = softmax(some_query @ some_keys.T / np.sqrt(3))[0]
    for token in range(7):
        kept = np.arange(7) != token
        wanted = attention(some_query, some_keys[kept], some_values[kept])[0]
        assert np.allclose(attempt(weights, some_values, token), wanted), "do the weights that stay sum to 1?"


report(check_output_without, output_without)


# %% tags=["solution"]
def solution_output_without(weights, values, i):
    staying = np.delete(weights, i)
    return staying / staying.sum() @ np.delete(values, i, axis=0)


report(check_output_without, solution_output_without)

# %% [markdown]
# Next: [lesson 2, KeyDiff](02_keydiff.md), which chooses without looking at a single query.
