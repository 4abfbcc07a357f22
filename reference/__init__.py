"""The mathematics: every method in NumPy float64, one function per numbered equation, in the order
of its paper.

A file with the attribute `METHOD` is an eviction method. The others are the derivation and the
variants of one method (`*_theory`, `*_variants`), what follows a method (`ada_kv`, `cake`, `cam`,
`chunk_kv`, `dms`, `protect`, `pyramid_kv`, `quantisation`, `rerotation`), and what all methods share
(`checks`, `attention`, `rope`, `selection`, `cache`). Files here import only NumPy and `reference` itself.

`TRAITS = {"recursive"}` beside `METHOD` names the properties that most methods do not have:
every_token: it compresses again with every new token;
evicts_first: it evicts before the new token attends, so the new token attends to the kept tokens;
own_budget: it decides by itself how many tokens stay;
prompt_only: it needs the queries of all tokens, so it compresses the prompt alone;
recursive: it compresses each token once and leaves it alone afterwards.

`INPUTS = {"name": (source, meaning)}` beside `METHOD` names the inputs that no other method brought
along. source is what they are computed from: "queries", "hidden_states", or "calibration" where a
text can calibrate them.

The signature of a function says the axes of its arrays and the ranges of its settings, in the notation of
`contract.py`. What does not fit raises ValueError, with the argument, what was got and what was wanted.

Axes, everywhere: keys and values `[B, H_kv, T, D]`, queries `[B, H_q, M, D]`, scores and kept masks
`[B, H_kv, T]`; `H_q = G * H_kv`, and query head h reads KV head `h // G`. Keys are cached after
RoPE. A higher score means keep. A kept mask is boolean, True = keep. `budget` counts the tokens
kept per head, `compression_ratio` is the fraction removed, `keep_ratio` the fraction kept.
Functions of one equation read as one head, `[..., T, D]`, and take any leading axes.
"""

if __name__ != "evictionary.reference":
    raise ImportError("import evictionary.reference, so that no module of it exists twice")
