"""kvpress's `PyramidKVPress`: the budget that it gives
each layer of a long prompt, with a window of one token.
"""

from types import SimpleNamespace

from kvpress import PyramidKVPress

from conformance.borrowed import leave_out


def budgets(budget, num_layers, *, beta=20):
    leave_out(
        num_layers < 2 or budget < beta,
        "one layer, or a last layer of less than the window, for which the press has no pyramid",
    )
    press = PyramidKVPress(compression_ratio=0.75, window_size=1, beta=beta)
    config = SimpleNamespace(num_hidden_layers=num_layers)
    modules = [SimpleNamespace(config=config, layer_idx=layer) for layer in range(num_layers)]
    return [press.get_layer_budget(module, 4 * budget) for module in modules]
