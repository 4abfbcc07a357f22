"""Correct KVzaps of other kinds."""

from evictionary.spec_tests.shared.variants import *


@control("kvzap.select", array_library="torch", dtypes=ALL)
def torch_places(keys, hidden_states, surrogate_weights, surrogate_bias, *, threshold=-4.0, window_size=128):
    """A token is evicted where it has a state, has left the window, and scores less."""
    (batch, heads, length, _), count = keys.shape, hidden_states.shape[1]
    scores = torch.einsum("btc,bhc->bht", hidden_states.double(), surrogate_weights.double())
    low = scores + surrogate_bias.double()[..., None] < threshold
    evicted = torch.zeros(batch, heads, length, dtype=torch.bool)
    evicted[..., length - count : max(0, length - window_size)] = low[..., : max(0, count - window_size)]
    return ~evicted


@control("kvzap.target", array_library="torch", dtypes=ALL)
@through_float32
def torch_at_once(keys, values, w_o, replay_queries, replay_keys, replay_hidden_states):
    """The whole attention of the replay, divided by the states and multiplied by the additions."""
    weights = torch_weights(replay_queries, torch.cat([keys, replay_keys], dim=2))[..., : keys.shape[2]]
    readers = replay_hidden_states.norm(dim=-1)[:, None, :, None]
    added = values.repeat_interleave(len(w_o) // keys.shape[1], dim=1) @ w_o
    shares = (weights / readers).nan_to_num(0, 0) * added.norm(dim=-1)[:, :, None]
    return shares.unflatten(1, (keys.shape[1], -1)).amax(dim=(2, 3)).clamp(min=1e-30).log()


@control("kvzap.fit", array_library="torch", dtypes=ALL)
def torch_singular_values(hidden_states, target_scores, *, ridge=1.0):
    """Each direction of the states shrinks by s / (s^2 + ridge)."""
    states, targets = hidden_states.double(), target_scores.double()
    middle, mean = states.mean(dim=1, keepdim=True), targets.mean(dim=2, keepdim=True)
    left, sizes, right = torch.linalg.svd(states - middle, full_matrices=False)
    weights = ((targets - mean) @ left * (sizes / (sizes**2 + ridge))[:, None]) @ right
    return weights.to(hidden_states.dtype), (mean - weights @ middle.mT)[..., 0].to(hidden_states.dtype)
