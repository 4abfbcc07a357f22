"""Trains the gates of DuoAttention on passkeys: which heads
must see the whole text to answer as the full model does.

The model stays as it is. Each head gives `gate * full attention + (1 - gate) * streaming attention`, and Adam
lowers the squared distance of the final hidden states to those of the full model at the tokens of the answer,
and a penalty on the gates. A run that was killed goes on where it stopped: its state is replaced as a whole
after each step, and each step draws its prompt from the seed and its own number.

The recipe is known from public code: mit-han-lab/duo-attention, duo_attn/train.py at 03dca84. Its learning
rate, its schedule and its start at 1 are kept; the prompts are our own, with one number in each.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from evictionary.cache import file
from evictionary.cache.model_hooks import Attention, require_prompt, watch
from evictionary.errors import require, require_known, usage
from evictionary.evaluation import tasks
from evictionary.models.load import EVICTED
from evictionary.models.weights import device_of
from evictionary.store import Progress, replaced

SCHEMA = "evictionary/gate-training/1"
TASKS = ("passkey7", "passkey64")
# The most tokens of an answer: 64 digits and a space, in a tokenizer of bytes.
ANSWER = 65


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What decides the result of a training, for a given model.

    steps, of one prompt each; shortest and longest, the tokens of a prompt, its question included; sink_size
    and recent_size, the first and the last tokens that streaming attention sees; penalty, the factor of the
    sum of the gates; learning_rate, the largest, after the first fifth of the steps and before the last;
    seed, of the prompts. Raises UsageError for a value out of range, or where a streaming head would see all
    of the shortest prompt.
    """

    steps: int
    shortest: int = 256
    longest: int = 448
    sink_size: int = 16
    recent_size: int = 64
    penalty: float = 0.005
    learning_rate: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        least = {
            "steps": 1,
            "recent_size": 1,
            "sink_size": 0,
            "penalty": 0,
            "learning_rate": 0,
            "longest": self.shortest,
        }
        for name, low in least.items():
            require(getattr(self, name) >= low, f"{name}: got {getattr(self, name)}, wanted at least {low}")
        require(
            self.shortest > self.sink_size + self.recent_size,
            f"shortest: got prompts of {self.shortest} tokens, wanted more than the "
            f"{self.sink_size + self.recent_size} of a "
            "streaming head, which would see everything",
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step: it rises for a fifth of the steps, and falls for the last fifth,
        from and to a tenth.
        """
        part = max(1, self.steps // 5)
        return self.learning_rate * min(1, max((step + 1) / part, 0.1), max((self.steps - step) / part, 0.1))


def recipe_of(steps: int, settings: Mapping[str, str]) -> Recipe:
    """The recipe with these settings, which are texts. Raises UsageError for an unknown name or a text
    that is no number.
    """
    defaults: dict[str, Any] = {
        each.name: each.default for each in dataclasses.fields(Recipe) if each.name != "steps"
    }
    typed: dict[str, Any] = {}
    for name, text in settings.items():
        require_known("recipe", name, defaults)
        with usage(f"{name}: got {text!r}, wanted a number such as {defaults[name]}", ValueError):
            typed[name] = type(defaults[name])(text)
    return Recipe(steps, **typed)


class Trained(NamedTuple):
    """Gates [1, H_kv] of each layer with full attention, and
    the curve: of each step the distance and the mean gate.
    """

    gates: dict[int, torch.Tensor]
    curve: list[tuple[float, float]]


class GatedModel:
    """A model whose heads mix full and streaming attention by gates [layers, H_kv], one row for each layer
    with full attention.

    `final_states` of the full model are those with gates of None. Raises UsageError for a model whose
    attention is fixed.
    """

    def __init__(self, model: PreTrainedModel, sink_size: int, recent_size: int) -> None:
        config, layers = model.config.get_text_config(), DynamicCache(config=model.config).layers
        self.model, self.sink_size, self.recent_size = model, sink_size, recent_size
        self.layers = [index for index, layer in enumerate(layers) if type(layer) in EVICTED]
        self.num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._gates: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    def final_states(self, ids: torch.Tensor, rows: int, gates: torch.Tensor | None = None) -> torch.Tensor:
        """The final hidden states [rows, hidden] of the last tokens of ids [1, T], in float32 or wider."""
        self._gates, self._mask = (
            gates,
            _streaming_mask(ids.shape[1], self.sink_size, self.recent_size, self.model),
        )
        stop = watch(self, self.model)
        try:
            states = self.model.base_model(ids.to(device_of(self.model)), use_cache=False).last_hidden_state[
                0, -rows:
            ]
        finally:
            stop()
        return states.to(torch.promote_types(states.dtype, torch.float32))

    # called by the attention of model_hooks.py

    def handed(self, layer_index: int, keys: torch.Tensor) -> int | None:
        return layer_index if self._gates is not None and layer_index in self.layers else None

    def attend(
        self,
        layer_index: int,
        module: torch.nn.Module,
        queries: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> tuple[torch.Tensor, None]:
        assert self._gates is not None and self._mask is not None
        streams = self._mask.to(queries.device)  # a divided model has layers on several devices
        full, streaming = attention(mask)[0], attention(streams)[0]  # [B, M, H_q, D_v]
        gates = self._gates[self.layers.index(layer_index)].to(full)
        each = gates.repeat_interleave(full.shape[2] // self.num_kv_heads)[:, None]
        return each * full + (1 - each) * streaming, None

    def see(self, *told: Any, **named: Any) -> None: ...

    see_batch = see_hidden_states = see_end = see_failure = see


def _streaming_mask(length: int, sink_size: int, recent_size: int, model: PreTrainedModel) -> torch.Tensor:
    """The additive mask [1, 1, T, T] of tokens that see the first
    `sink_size` and, themselves among them, `recent_size` last.
    """
    places = torch.arange(length, device=device_of(model))
    ago = places[:, None] - places
    visible = (ago >= 0) & ((ago < recent_size) | (places < sink_size))
    mask = torch.zeros(length, length, dtype=model.dtype, device=device_of(model))
    return mask.masked_fill(~visible, torch.finfo(model.dtype).min)[None, None]


def prompt(tokenizer: Any, recipe: Recipe, step: int) -> tuple[torch.Tensor, int]:
    """The ids [1, T] of a passkey prompt with its answer but the last token, and the number of states that
    say the answer.
    """
    draw = random.Random(f"gates/{recipe.seed}/{step}")
    task, tokens = draw.choice(TASKS), draw.randint(recipe.shortest, recipe.longest)
    made = tasks.get(task).make(tokenizer, tokens, draw.randrange(2**31))
    answer = tasks.answer_ids(tokenizer, made.answers)
    return torch.cat([made.context_ids, made.question_ids, answer[:, :-1]], dim=1), answer.shape[1]


def distance(gated: GatedModel, ids: torch.Tensor, rows: int, gates: torch.Tensor) -> torch.Tensor:
    """The mean squared distance of the last `rows` final hidden states to those of the full model; only
    gates get a gradient.
    """
    with torch.no_grad():
        wanted = gated.final_states(ids, rows)
    return (gated.final_states(ids, rows, gates) - wanted).square().mean()


def train(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe,
    state: str | Path,
    advance: Callable[[Progress], None] = lambda progress: None,
) -> Trained:
    """Train the gates, or go on with a training whose
    state is in that file; a finished one is read from it.

    Raises UsageError for a state of another model or recipe, or prompts that are too short for the task or
    too long for the model.
    """
    state, start = Path(state), time.perf_counter()
    gated = GatedModel(model, recipe.sink_size, recipe.recent_size)
    require_prompt(
        recipe.longest + ANSWER, getattr(model.config.get_text_config(), "max_position_embeddings", None)
    )
    for task in TASKS:  # the shortest prompt is refused now, not at the step that draws it
        tasks.get(task).make(tokenizer, recipe.shortest, recipe.seed)
    wide = torch.promote_types(model.dtype, torch.float32)
    gates = torch.ones(len(gated.layers), gated.num_kv_heads, dtype=wide, device=device_of(model))
    optimizer = torch.optim.Adam([gates])
    curve: list[tuple[float, float]] = []
    settings = {"schema": SCHEMA, "model": file.fingerprint(model), "recipe": dataclasses.asdict(recipe)}
    if state.exists():
        tensors = _read(settings, state)
        gates.copy_(tensors["gates"])
        moved = {name: each.to(gates.device) for name, each in tensors.items()}
        optimizer.state[gates] = {name: moved[name] for name in ("step", "exp_avg", "exp_avg_sq")}
        curve = [(float(row[0]), float(row[1])) for row in tensors["curve"]]
    gates.requires_grad_()
    before = len(curve)
    for step in range(before, recipe.steps):
        lost = distance(gated, *prompt(tokenizer, recipe, step), gates)
        # The gradient is asked for by name, so the weights of the model get none and need not be frozen.
        (gates.grad,) = torch.autograd.grad(lost + recipe.penalty * gates.abs().sum(), gates)
        optimizer.param_groups[0]["lr"] = recipe.rate(step)
        optimizer.step()
        with torch.no_grad():
            gates.clamp_(0, 1)
        curve.append((lost.item(), gates.mean().item()))
        tensors = {
            "gates": gates.detach(),
            **optimizer.state[gates],
            "curve": torch.tensor(curve, dtype=torch.float64),
        }
        with replaced(state) as path:
            file.write_tensors(
                "output", path, settings, {name: each.cpu().contiguous() for name, each in tensors.items()}
            )
        done, total = step + 1 - before, recipe.steps - before
        text = (
            f"gates, step {step + 1} of {recipe.steps}: distance {curve[-1][0]:.3g}, mean gate "
            f"{curve[-1][1]:.3f}"
        )
        advance(Progress(done, total, text, (time.perf_counter() - start) / done * (total - done)))
    return Trained(
        {layer: row[None] for layer, row in zip(gated.layers, gates.detach().float(), strict=True)}, curve
    )


def summary(recipe: Recipe, trained: Trained) -> dict[str, Any]:
    """The recipe, the number of heads with a gate of at least
    1/2, the gates by layer and the curve, ready for JSON.
    """
    gates = {layer: [round(gate, 4) for gate in row[0].tolist()] for layer, row in trained.gates.items()}
    every = [gate for row in gates.values() for gate in row]
    return {
        "recipe": dataclasses.asdict(recipe),
        "retrieval_heads": sum(gate >= 0.5 for gate in every),
        "heads": len(every),
        "gates": gates,
        "curve": [[float(f"{lost:.4g}"), round(mean, 4)] for lost, mean in trained.curve],
    }


def _read(wanted: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
    settings, tensors = file.read_tensors("output", path, SCHEMA, "of a training of gates, or none")
    for name in ("model", "recipe"):
        require(
            settings[name] == wanted[name],
            f"output: got {path} of a training with another {name}, {settings[name]}, wanted {wanted[name]}: "
            "go on with that "
            "one, or delete the file to start again",
        )
    return tensors
