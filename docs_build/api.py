"""The pages of the API that nobody writes by hand: one for each module of three layers, and the index with a
sentence for each name. mkdocstrings fills each marker `:::` from signatures and docstrings.
"""

import ast
import re
from collections.abc import Callable

import evictionary
from docs_build.entries import ROOT, definitions
from evictionary import source

LAYERS = {
    "reference": "The mathematics, in NumPy",
    "optimized": "The fast code, in torch",
    "optimized/kernels": "The kernels, in Triton",
}
# What a user has in hand, and what `dir(evictionary)` shows: its page, and where its docstring is.
PUBLIC = {
    "EvictingCache": ("evicting_cache.md", "evictionary/cache/evicting_cache.py::EvictingCache"),
    "models.load.load": ("load.md", "evictionary/models/load.py::load"),
    "methods.resolve.resolve": ("methods.md", "evictionary/methods/resolve.py::resolve"),
    "methods.method.Method": ("methods.md", "evictionary/methods/method.py::Method"),
    "methods.method.Request": ("methods.md", "evictionary/methods/method.py::Request"),
    "judge": ("judge.md", "evictionary/cli/judge.py::judge"),
    "reference": ("#reference", "reference/__init__.py"),
    "optimized": ("#optimized", "optimized/__init__.py"),
    "spec_tests": ("judge.md", "spec_tests/__init__.py"),
}


def described(path: str) -> str:
    """The first sentence of a docstring: of a file, or of a function or class of it (`path::name`)."""
    file, _, name = path.partition("::")
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    text = definitions(file)[name].docstring if name else ast.get_docstring(module)
    sentence = re.split(r"(?<=[.:]) (?=[A-Z`])", source.first_paragraph(text or ""))[0]
    return re.sub(r"[:.]?$", ".", sentence, count=1)


def modules() -> dict[str, str]:
    """The modules of the three layers by path, each with its first sentence."""
    return {
        path.relative_to(ROOT).with_suffix("").as_posix(): described(path.relative_to(ROOT).as_posix())
        for folder in LAYERS
        for path in sorted((ROOT / folder).glob("*.py"))
        if path.stem != "__init__"
    }


def pages(rendered: Callable[..., str], source_url: Callable[[str], str]) -> dict[str, str]:
    """A page for each module, and the list of all pages, from the folder docs/. Modules stay out of the
    navigation, which every page repeats.
    """
    page = "# {0}.py\n\n[Source]({1})\n\n::: evictionary.{2}\n"
    found = {path: page.format(path, source_url(f"{path}.py"), path.replace("/", ".")) for path in modules()}
    public = {name: (page, described(place)) for name, (page, place) in PUBLIC.items()}
    public["__version__"] = ("", f'The version, "{evictionary.__version__}" here.')
    found["modules"] = rendered(
        "api_index", "reference/api/modules.md", public=public, layers=LAYERS, modules=modules()
    )
    return {f"reference/api/{path}.md": text for path, text in found.items()}
