"""The commands `evictionary run` and `evictionary export`: a method inside a model."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from evictionary.cli.console import (
    AS_IT_IS,
    LIBRARIES,
    AsJson,
    Budget,
    Loading,
    ModelName,
    Options,
    RandomSeed,
    Ratio,
    app,
    examples,
    exit_codes,
    loads_a_model,
    mebibytes,
    messages,
    options_in,
    ratio_of,
    require_seed,
    require_usable,
    show,
    text_of,
    whole_number,
)
from evictionary.errors import require
from evictionary.progress import doing

if TYPE_CHECKING:
    from evictionary.cache.evicting_cache import EvictingCache
    from evictionary.methods.method import Method

FULL, AUTO = "full cache", "auto"


def every_tokens(and_also: str = "") -> Any:
    """The option `--every`."""
    return whole_number(
        f"Compress again after this many new tokens, such as 64{and_also}; by default only the prompt is "
        "compressed, with momentkv each token."
    )


@app.command(
    epilog=examples(
        'evictionary run --prompt-file book.txt --question "Who wrote it?"',
        'evictionary run --prompt-file book.txt --question "Who?" --question "When?" '
        "--method lagkv --option lag_size=128 --compression-ratio 0.5",
    )
)
@loads_a_model
def run(
    prompt_file: Annotated[Path, typer.Option(help="A UTF-8 text file: the context to compress.")],
    question: Annotated[list[str], typer.Option(help="A question about the text; may be repeated.")],
    model: ModelName = "embedded",
    loading: Loading = AS_IT_IS,
    method: Annotated[
        str,
        typer.Option(
            help="A method's name, a file such as my_scorer.py, or a composition such as snapkv+ada_kv. "
            "auto: of the methods that read the text once, the one with the lowest loss in our studies of "
            "one small model, at the nearest ratio."
        ),
    ] = AUTO,
    readings: Annotated[
        int | None,
        whole_number(
            "How often auto may let the model read the text. With 2 it takes the method that costs least of "
            "all, and reading lasts about three times as long.",
            show_default="1",
        ),
    ] = None,
    compression_ratio: Ratio = None,
    budget: Budget = None,
    option: Options = None,
    every: Annotated[int | None, every_tokens(", and read the text in blocks of that size")] = None,
    max_new_tokens: Annotated[int, whole_number("The longest answer, in tokens.")] = 64,
    seed: RandomSeed = 0,
    full: Annotated[bool, typer.Option(help="Answer from the full cache too, and show both answers.")] = True,
    as_json: AsJson = False,
) -> None:
    """Compress the cache of a text once, then answer several questions from it."""
    with exit_codes(extra="model"):
        options = options_in(option or [])
        text = text_of("--prompt-file", prompt_file)
        require_seed(seed)
        for each in question:
            require(each.strip(), "question: got no text, wanted a text")
        require(max_new_tokens >= 1, f"--max-new-tokens: got {max_new_tokens}, wanted at least 1")
        require(every is None or every >= 0, f"every: got {every}, wanted at least 0")
        ratio = ratio_of(compression_ratio, budget)
        is_auto = method == AUTO
        _require_of_auto(is_auto, readings, option or [])
        require_usable(model, [] if is_auto else [method])
        with doing(LIBRARIES) as now:
            from evictionary.cache.arguments import checked

            if is_auto:
                from evictionary.evaluation.study import recommended

                method, _ = recommended(ratio, readings or 1)
            chosen, options, _ = checked(method, ratio, options, budget, every)
            assert chosen is not None
            from evictionary.cache.evicting_cache import EvictingCache
            from evictionary.cache.model_hooks import require_prompt
            from evictionary.evaluation.questions import ask, prefill, tokenize
            from evictionary.models.load import load as load_model

            now("loading the model")
            loaded, tokenizer = load_model(model, **vars(loading))
            asked = [tokenize(tokenizer, text, each) for each in question]
            context_ids = asked[0][0]
            length = context_ids.shape[1]
            longest = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
            require_prompt(length + max(ids.shape[1] for _, ids in asked) + max_new_tokens, longest)
            why = None
            if is_auto:  # the study has ratios
                _, why = recommended(ratio if budget is None else 1 - budget / length, readings or 1)
                messages.print(why, style="yellow", markup=False, highlight=False, soft_wrap=True)

            caches = {
                chosen.name: EvictingCache(loaded, chosen, ratio, options, budget, every=every, seed=seed),
                **({FULL: EvictingCache(loaded, method=None)} if full else {}),
            }
            answers: dict[str, list[str]] = {name: [] for name in caches}
            seconds: dict[str, dict[str, float]] = {}
            for name, cache in caches.items():
                often = 1 if name == FULL else chosen.readings(options)
                read_so_far = _tokens_read(cache, length, often)
                now(f"{name}: reading the prompt", read_so_far, often * length, " tokens")
                began = time.perf_counter()
                prefill(loaded, context_ids, cache, every if name != FULL else None)
                read = time.perf_counter()
                if name != FULL:
                    before, after = cache.nbytes_full, cache.nbytes
                    more = _note(cache, chosen)
                for index, (_, question_ids) in enumerate(asked):
                    now(f"{name}: answering question {index + 1} of {len(question)}")
                    answers[name].append(ask(loaded, tokenizer, cache, question_ids, max_new_tokens).text)
                seconds[name] = {"reading": read - began, "answering": time.perf_counter() - read}
        cache = caches[chosen.name]
        both = [
            {"question": each} | ({"full_answer": answers[FULL][index]} if full else {}) | {"answer": own}
            for index, (each, own) in enumerate(zip(question, answers[chosen.name], strict=True))
        ]
    found = {
        "model": model,
        "method": chosen.name,
        "options": options,
        "compression_ratio": ratio if budget is None else None,
        "budget": budget,
        "every": cache.every,
        "readings": chosen.readings(options),
        "tokens": cache.get_seq_length(),
        "tokens_kept": cache.tokens_kept,
        "bytes_before": before,
        "bytes_after": after,
        "peak_tokens": cache.peak_tokens,
        "seconds": seconds,
        "note": "; ".join(said for said in (why, more) if said) or None,
        "answers": both,
    }
    kept = f"{cache.tokens_kept:.5g} of {cache.get_seq_length()} tokens kept in each head"
    took = [
        f"{name}: {each['reading']:.1f} s to read the text{' and compress' * (name != FULL)}, "
        f"{each['answering']:.1f} s to answer"
        for name, each in seconds.items()
    ]
    told = [
        f"{chosen.name}: {kept}, {mebibytes(before)} MiB became {mebibytes(after)} MiB",
        *took,
        Text(more or "", "yellow"),
        *(
            part
            for one in both
            for part in (
                Text(f"\n{one['question']}", "bold"),
                Text(f"full cache: {one['full_answer']}" if full else "", "dim"),
                Text(f"{chosen.name}: {one['answer']}" if full else one["answer"]),
            )
        ),
    ]
    show(as_json, found, told, soft_wrap=True)


@app.command(
    epilog=examples(
        "evictionary export evicting --method keydiff --budget 512",
        'model.generate(**inputs, custom_generate="evicting", trust_remote_code=True)',
    )
)
def export(
    folder: Annotated[Path, typer.Argument(help="The folder to write; the folder of a model will do.")],
    method: Annotated[
        str, typer.Option(help="A method's name, or a composition: snapkv+ada_kv, keydiff+moments.")
    ] = "keydiff",
    compression_ratio: Ratio = None,
    budget: Budget = None,
    option: Options = None,
    every: Annotated[int | None, every_tokens()] = None,
    seed: RandomSeed = 0,
) -> None:
    """Write a folder for model.generate(custom_generate=FOLDER):
    plain transformers code can use it unchanged.
    """
    with exit_codes(extra="model"):
        require_seed(seed)
        ratio, options = ratio_of(compression_ratio, budget), options_in(option or [])
        require_usable(methods=[method])
        with doing(LIBRARIES):
            from evictionary.cache.export import export as write

            path = write(folder, method, ratio, options, budget, every=every, seed=seed)
    typer.echo(str(path))


def _require_of_auto(is_auto: bool, readings: int | None, options: list[str]) -> None:
    """Raise UsageError for what only `auto` takes, or only a method that is named."""
    require(
        is_auto or readings is None,
        f"--readings: got {readings} with a --method that is named, wanted --method auto: a method that is "
        "named reads as often as it needs",
    )
    require(readings in (None, 1, 2), f"--readings: got {readings}, wanted 1 or 2")
    require(
        not (is_auto and options),
        f"--option: got {', '.join(options)} with --method auto, wanted a method that is named, such as "
        "--method lagkv: each has options of its own",
    )


def _tokens_read(cache: "EvictingCache", length: int, readings: int) -> Callable[[], float]:
    """How many tokens the layers of a cache have read so far, on average: a second reading is counted where
    a layer has compressed.
    """
    from evictionary.cache.layers import evicting

    layers = evicting(cache.layers)

    def tokens() -> float:
        again = (readings - 1) * sum(layer.evicted_at > 0 for layer in layers)
        return (sum(min(layer.seen, length) for layer in layers) + again * length) / len(layers)

    return tokens


def _note(cache: "EvictingCache", chosen: "Method") -> str | None:
    """Where more is kept than was asked for: the reason,
    or a sentence that says by how much; otherwise None.
    """
    from evictionary.methods.method import tokens_to_keep

    length = cache.get_seq_length()
    asked = tokens_to_keep(length, cache.compression_ratio, cache.budget)
    if cache.tokens_kept <= asked or asked == length:
        return None
    if chosen.is_per_query:
        return f"{chosen.name} evicts nothing: later tokens attend to about {asked} of {length} tokens each"
    if cache.tokens_kept < length:
        reasons = {
            "own_budget": "it sets its own budget",
            "recursive": "no partition is shared, and the sinks and the last partition stay whole",
        }
        more = (
            f"its {chosen.function.__name__} keeps more than the budget that it is given; a method that "
            'decides by itself how many stay says TRAITS = {"own_budget"}'
        )
        if chosen.delays:
            more = "the tokens of its window stay, and a threshold decides for the others"
        why = next((reason for trait, reason in reasons.items() if trait in chosen.traits), more)
        return f"{chosen.name} keeps {cache.tokens_kept:.5g} tokens where {asked} were asked for: {why}"
    reason = chosen.why_nothing_removed(length, cache.options)
    known = ", ".join(f"{name}={value}" for name, value in (chosen.options | cache.options).items())
    advice = f"; smaller options may help (now {known}): --option name=value" if known else ""
    all_kept = f"{chosen.name} chose to keep all {length} tokens where {asked} were asked for"
    return f"Nothing was removed: {reason or all_kept}{advice}"
