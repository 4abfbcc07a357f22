"""KVCache-Factory's `PyramidKVCluster`: what each layer
keeps of a long prompt beside a window of one token.
"""

import torch

from conformance.adapters.kvcache_factory.clusters import PyramidKVCluster
from conformance.borrowed import leave_out


def budgets(budget, num_layers, *, beta=20):
    leave_out(
        num_layers < 2 or beta != int(beta),
        "one layer, or a beta that is not whole, which the class does not take",
    )
    prompt = torch.zeros(1, 1, 2 * budget + 2, 1)  # so long that no layer's budget is cut

    def kept(layer):
        cluster = PyramidKVCluster(num_layers, 1, budget + 1, 1, beta=int(beta), layer_idx=layer)
        return cluster.update_kv(prompt, prompt, prompt, None, None)[0].shape[2] - 1

    return [kept(layer) for layer in range(num_layers)]
