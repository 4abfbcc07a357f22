"""The command `evictionary calibrate`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from evictionary.cli.console import (
    AS_IT_IS,
    LIBRARIES,
    AsJson,
    Loading,
    ModelName,
    app,
    examples,
    exit_codes,
    loads_a_model,
    measuring,
    options_in,
    progress,
    require_usable,
    require_writable,
    show,
    text_of,
    whole,
)
from evictionary.errors import require
from evictionary.progress import doing


@app.command(
    epilog=examples(
        "evictionary calibrate --text-file book.txt --output book.calibration",
        "evictionary run --method q_filters --option calibration=book.calibration ...",
        "evictionary calibrate --text-file book.txt --output book.calibration --train-gates 160 "
        "--recipe longest=1000",
        "evictionary run --method duo_attention --option calibration=book.calibration --option sink_size=16 "
        "--option recent_size=64 ...",
    )
)
@loads_a_model
def calibrate(
    text_file: Annotated[
        Path, typer.Option(help="A UTF-8 text file of some hundred to some thousand words.")
    ],
    output: Annotated[Path, typer.Option(help="The file to write.")],
    model: ModelName = "embedded",
    loading: Loading = AS_IT_IS,
    train_gates: Annotated[
        int | None,
        typer.Option(
            parser=whole,
            metavar="STEPS",
            help="Train DuoAttention's gates on so many prompts with a hidden number, instead of estimating "
            "them from the text. "
            "With the embedded model a step takes 5 to 10 seconds of one core; after each, OUTPUT.training "
            "holds the state.",
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting of the training, name=value, repeated. By default shortest=256 and longest=448 "
            "(the tokens of a "
            "prompt), sink_size=16 and recent_size=64 (what a streaming head sees), penalty=0.005 (a larger "
            "one makes more heads "
            "streaming ones), learning_rate=0.02, seed=0."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Calibrate TriAttention, Q-Filters, DuoAttention and KVzap on a text, for any number of later prompts of
    the same model.

    A training that was stopped continues from there if you repeat the command.
    """
    with exit_codes("the same command goes on where a training stopped", extra="model"):
        text = text_of("--text-file", text_file)
        require_writable(output)
        settings = options_in(recipe or [])
        require(
            not settings or train_gates is not None,
            f"--recipe: got {', '.join(settings)} without a training, wanted --train-gates STEPS too",
        )
        require_usable(model)
        with progress(LIBRARIES) as (plan, advance):
            from evictionary.cache.calibration import write
            from evictionary.evaluation import gate_training
            from evictionary.evaluation.calibration import MOST, of_text
            from evictionary.models.load import load

            chosen = None if train_gates is None else gate_training.recipe_of(train_gates, settings)
            with doing("loading the model"):
                loaded, tokenizer = load(model, **vars(loading))
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            layers = of_text(loaded, ids, plan, advance)
        found: dict[str, Any] = {
            "output": str(output),
            "layers": len(layers),
            "tokens": min(ids.shape[1], MOST),
        }
        if chosen:
            with measuring("the first step") as tell:
                trained = gate_training.train(loaded, tokenizer, chosen, f"{output}.training", tell)
            for layer, gates in trained.gates.items():
                layers[layer]["gates"] = gates
            found |= {"model": model} | gate_training.summary(chosen, trained)
        write(loaded, layers, output)
    gates_trained = (
        f"; {found['retrieval_heads']} of {found['heads']} heads keep all tokens" if chosen else ""
    )
    told = f"{output}: {found['layers']} layers, from {found['tokens']} tokens{gates_trained}"
    show(as_json, found, [Text(told)], indent=None)
