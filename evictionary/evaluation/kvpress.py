"""A bridge to NVIDIA's kvpress, both ways: a method of this project as a press, and a press as a method.

    from kvpress import KVPressTextGenerationPipeline
    from evictionary.evaluation.kvpress import MethodPress

    with MethodPress("lagkv", compression_ratio=0.5)(model): # kvpress's own
        models, pipeline and evaluation model(input_ids, past_key_values=cache)

The other way, in a file that `evictionary eval --method my_press.py` and `EvictingCache` take:

    from kvpress import SnapKVPress
    from evictionary.evaluation.kvpress import score_of

    def score(queries, keys, values):
        return score_of(SnapKVPress(window_size=64), queries, keys, values)

kvpress 0.5.5 wants transformers 5.2, where methods run and EvictingCache does not. Its scores run beside a
newer one too: `pip install cachetools datasets fire`, then `pip install --no-deps kvpress==0.5.5`.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from kvpress.presses.base_press import BasePress
from kvpress.utils import get_prerope_query_states
from transformers.models.llama.modeling_llama import rotate_half

from evictionary.errors import require, usage
from evictionary.methods import catalogue
from evictionary.methods.method import Request
from evictionary.methods.resolve import resolve
from evictionary.models.weights import output_projection

# The inputs that a press has; calibrations and a second reading of the prompt are none of them.
GIVEN = catalogue.SHARED.keys() - catalogue.REPLAYED - {"moments"}


@dataclass
class MethodPress(BasePress):
    """A method of this project, or a composition such as `snapkv+ada_kv`, as a press.

    Args: method, as EvictingCache takes it; compression_ratio, the share of each head's tokens that goes;
    options, the method's own; seed, for methods that draw. Raises UsageError for a method that needs what no
    press has. Heads that keep different numbers of tokens are masked, as AdaKVPress does it: the cache stays
    as large as it was.
    """

    method: str = "keydiff"
    compression_ratio: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.chosen = resolve(self.method)
        missing = sorted(self.chosen.reads - GIVEN)
        require(
            not missing and not self.chosen.corrected,
            f"method: got {self.method!r}, which needs {', '.join(missing) or 'an attention of its own'}; "
            "wanted a method that reads the states of one layer",
        )

    def compress(
        self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [B, H_kv, n, D] that stay."""
        states = {"keys": keys, "values": values, "hidden_states": hidden_states}
        if "queries" in self.chosen.captured:
            queries = get_prerope_query_states(module, hidden_states)
            cos, sin = (each.unsqueeze(1) for each in kwargs["position_embeddings"])
            states["queries"] = queries * cos + rotate_half(queries) * sin
        if "w_o" in self.chosen.reads:
            states["w_o"] = output_projection(module, values)
        request = Request(
            self.compression_ratio,
            options=self.options,
            layer_index=module.layer_idx,
            num_layers=module.config.num_hidden_layers,
            seed=self.seed,
        )
        kept = self.chosen.kept(states, request)
        counts = kept.sum(dim=-1)
        if counts.min() != counts.max():
            require(
                module.config._attn_implementation != "eager",
                f"method: got {self.method!r}, whose heads keep different numbers of tokens, with eager "
                "attention, which kvpress does not mask; wanted another attention of the model",
            )
            module.masked_key_indices = (~kept).nonzero(as_tuple=True)
            return keys, values
        return tuple(each[kept].view(*kept.shape[:2], -1, each.shape[-1]) for each in (keys, values))


def layer(num_heads: int, num_kv_heads: int, head_dim: int, **config: Any) -> SimpleNamespace:
    """What a press reads of an attention layer, whose query projection is the identity."""
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    return SimpleNamespace(
        config=SimpleNamespace(**sizes, _attn_implementation="sdpa", **config),
        layer_idx=0,
        head_dim=head_dim,
        num_key_value_groups=num_heads // num_kv_heads,
        q_proj=torch.nn.Identity(),
    )


def unturned(queries: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Queries [B, H_q, M, D] after RoPE as the hidden states of a `layer`, and cos and sin of no turn."""
    batch, _, count, channels = queries.shape
    still = queries.new_ones(batch, count, channels), queries.new_zeros(batch, count, channels)
    return queries.transpose(1, 2).flatten(2), still


def score_of(press: Any, queries: Any, keys: Any, values: Any) -> torch.Tensor:
    """The scores [B, H_kv, T] of a press that reads keys, values and queries, all after RoPE.

    Args: press, a ScorerPress; tensors or arrays queries [B, H_q, T, D], of every token, keys [B, H_kv, T, D]
    and values [B, H_kv, T, D_v]. The press meets a layer whose query projection is the identity and whose
    RoPE turns by nothing, for the queries are turned already. Raises UsageError for a press that reads more
    of a layer.
    """
    queries, keys, values = (torch.as_tensor(each) for each in (queries, keys, values))
    module = layer(queries.shape[1], keys.shape[1], queries.shape[3])
    hidden, turns = unturned(queries)
    told = f"press: got {type(press).__name__}, wanted one that reads queries, keys and values alone"
    with usage(told, AttributeError, NotImplementedError):
        return press.score(module, hidden, keys, values, None, {"position_embeddings": turns})
