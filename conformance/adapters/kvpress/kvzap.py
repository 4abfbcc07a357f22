"""kvpress's `DMSPress` around given scores, half of a text at once and the rest token by token, and the score
of `KVzapPress` with a linear surrogate that is given.
"""

from types import SimpleNamespace

import torch
from kvpress import DMSPress, KVzapPress

from conformance.adapters.kvpress.given import Given


def dms(scores, *, threshold, window_size):
    rows, middle = scores.reshape(1, -1, scores.shape[-1]), (scores.shape[-1] + 1) // 2
    press = DMSPress(Given(rows), threshold, window_size, decoding=True)
    module, kept = SimpleNamespace(layer_idx=0, masked_key_indices=None), torch.ones_like(rows) > 0
    for start, end in [(0, middle), *((place, place + 1) for place in range(middle, rows.shape[2]))]:
        press.press.scores = rows[..., start:end]
        cached = SimpleNamespace(keys=rows[..., :end, None], values=rows[..., :end, None])
        read = {
            "hidden_states": rows[..., start:end].mT,
            "cache_position": torch.arange(start, end),
            "past_key_values": SimpleNamespace(layers=[cached]),
        }
        press.forward_hook(module, [], read, [])
    kept[tuple(module.masked_key_indices or [[]] * 3)] = False
    return kept.reshape(scores.shape)


@torch.no_grad()
def score(hidden_states, surrogate_weights, surrogate_bias):
    weights, bias = surrogate_weights.flatten(0, 1), surrogate_bias.flatten()  # the items' heads in one layer
    linear, press = torch.nn.Linear(*weights.shape[::-1]), KVzapPress(model_type="linear")
    linear.load_state_dict({"weight": weights, "bias": bias})
    press.kvzap_model = SimpleNamespace(layers=[linear])
    return (
        press.score(SimpleNamespace(layer_idx=0), hidden_states, None, None, None, {})
        .unflatten(1, (len(hidden_states), -1))
        .diagonal()
        .permute(2, 0, 1)
    )


def select(keys, hidden_states, surrogate_weights, surrogate_bias, *, threshold=-4.0, window_size=128):
    judged = dms(
        score(hidden_states, surrogate_weights, surrogate_bias), threshold=threshold, window_size=window_size
    )
    return torch.nn.functional.pad(judged, (keys.shape[2] - judged.shape[2], 0), value=True)
