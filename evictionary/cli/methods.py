"""The command `evictionary methods`."""

from rich.table import Table

from evictionary.cli.console import AsJson, app, examples, show

# The names that may follow a method's name after a +.
ADDITIONS = {
    "ada_kv": "an allocator for any method with scores: the heads of a layer share its budget",
    "cake": "an allocator for any method with scores: layers whose attention spreads and moves get more",
    "cam": "for any method: the values of some evicted tokens are merged into the values of later kept ones",
    "chunk_kv": "for any method with scores: whole chunks of ten neighbouring tokens stay, the best first",
    "protect": "for any method with scores: the first tokens and the last stay whatever they score; first=4; "
    "last=32; prompt=False",
    "pyramid_kv": "an allocator: lower layers get more of the budget than higher ones",
    "moments": "MomentKV's correction, for any selection: moments of the evicted tokens join the attention",
    "kivi": "for any method: kept keys are quantised by channel, values by token; bits=2; group_size=32; "
    "residual=128",
    "hadamard": "for any method: kept keys and values are rotated and quantised; bits=4; group_size=32; "
    "residual=0",
    "fp8": "for any method: kept keys and values are rounded to e4m3, with a scale for each token; "
    "residual=0",
    "dms": "for any method with scores: a token is judged once, when it leaves the window of the last "
    "tokens, and goes below a threshold; cutoff=None; delay=128",
    "rerotate": "for any method: kept keys turn to consecutive positions, right before the next token",
}


@app.command(
    epilog=examples(
        "evictionary methods",
        "evictionary methods --json",
    )
)
def methods(as_json: AsJson = False) -> None:
    """List the methods: which tokens each keeps, its paper, its functions (score, select, compress,
    attend) and its options.

    Methods compose, with + between the names: a method, then allocators, then moments or cam. ada_kv lets the
    heads of a layer share its budget, chunk_kv keeps whole chunks, protect keeps both ends of the text, cake
    compares the layers, pyramid_kv gives more to lower layers, moments adds MomentKV's correction for the
    evicted tokens, and cam merges some of their values into later ones: snapkv+pyramid_kv+ada_kv,
    keydiff+moments, h2o+cam. kivi, hadamard and fp8 quantise what stays: keydiff+kivi. rerotate turns what
    stays to consecutive positions. dms judges a token by a threshold when it leaves a window: knorm+dms. A
    file of your own, path/to/file.py, composes in the same way.
    """
    from evictionary.methods.catalogue import BASELINES, describe, names

    found = [describe(name) for name in [*names(), *BASELINES]]
    table = Table.grid(padding=(0, 2))
    for each in found:
        paper = f"arXiv {each['paper']}; " if each["paper"] else ""
        options = "".join(f"; {name}={value}" for name, value in each["options"].items())
        table.add_row(f"[bold]{each['name']}[/]", each["description"])
        table.add_row("", f"[dim]{paper}{', '.join(each['seams'])}{options}[/]")
    for name, meaning in ADDITIONS.items():
        table.add_row(f"[bold]+{name}[/]", meaning)
    composing = (
        "\nMethods compose: a method, then allocators, then moments or cam: snapkv+pyramid_kv+ada_kv, "
        "keydiff+moments or h2o+cam. kivi, hadamard, fp8 or rerotate may follow: keydiff+kivi."
    )
    show(as_json, found, [table, composing])
