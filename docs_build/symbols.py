"""The symbols of a method's formulas: what each is, and its shape, from `symbols.toml` and the contract.

A page lists them below the formulas. The site's script takes the words from the list: a symbol of a formula
says them under the pointer, and an entry of the list marks its symbol.
"""

import functools
import html
import inspect
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from docs_build.entries import entries, stem_of
from evictionary.methods import catalogue
from evictionary.reference.contract import Said

WORDS = Path(__file__).parent / "symbols.toml"
ACCENTS = ("hat", "bar", "tilde")
# Greek letters that are written with another character than the plain one.
VARIANTS = {"epsilon": "\N{GREEK LUNATE EPSILON SYMBOL}", "ell": "\N{SCRIPT SMALL L}"}
SYMBOL = re.compile(
    r"(?:\\(?P<accent>hat|bar|tilde) ?)?"
    r"(?:\\mathrm\{(?P<word>[a-z]+)\}|\\mathcal (?P<set>[A-Z])|\\(?P<greek>[A-Za-z]+)|(?P<letter>[A-Za-z]))"
    r"(?:_(?P<sub>\{[^}]*\}|\\\w+|\w))?(?:\^\w)?"
)


class Symbol(NamedTuple):
    """A symbol of a formula: its TeX, its words and its shape."""

    tex: str
    words: str
    shape: str

    @property
    def drawn(self) -> dict[str, str]:
        """How the site's script finds it in a typeset formula: its character, its font where that is not the
        one of letters, its accent and its subscript.
        """
        found = SYMBOL.fullmatch(self.tex)
        if found is None:
            raise ValueError(f"{self.tex}: wanted a letter, with an accent, a subscript or both")
        part = {name: value or "" for name, value in found.groupdict().items()}
        base = part["word"] or part["set"] or part["letter"] or _greek(part["greek"])
        sub = re.sub(r"\\([A-Za-z]+)", lambda match: _greek(match[1]), part["sub"])
        font = "mathrm" if part["word"] else "mathcal" if part["set"] else ""
        return {"base": base, "font": font, "accent": part["accent"], "sub": re.sub(r"\W", "", sub)}

    def element(self) -> str:
        """Its entry in the list of a page."""
        data = "".join(f' data-{name}="{value}"' for name, value in self.drawn.items() if value)
        symbol = f'<span class="arithmatex">\\({html.escape(self.tex)}\\)</span>'
        return f'<li tabindex="0"{data}>{symbol} {html.escape(self.words)}, {html.escape(self.shape)}</li>'


def _greek(name: str) -> str:
    case = "CAPITAL" if name[0].isupper() else "SMALL"
    return VARIANTS.get(name) or unicodedata.lookup(
        f"GREEK {case} LETTER {name.removeprefix('var').upper().replace('LAMBDA', 'LAMDA')}"
    )


@functools.cache
def words() -> dict[str, dict[str, list[Any]]]:
    """What `symbols.toml` says, by method."""
    return tomllib.loads(WORDS.read_text(encoding="utf-8"))


def is_in(tex: str, formula: str) -> bool:
    """Whether a formula has a symbol: not as a part of a word, a command, or a symbol with a subscript."""
    if r"\mathrm" not in tex:
        formula = re.sub(r"\\(mathrm|operatorname|text)\{[^}]*\}", "", formula)
    after = "" if "_" in tex or "^" in tex else r"(?! ?_)"
    return bool(re.search(rf"(?<![A-Za-z\\]){re.escape(tex)}(?![A-Za-z]){after}", formula))


def symbols(stem: str, formulas: Iterable[str]) -> list[Symbol]:
    """The symbols of a method that its formulas use, in the order of the formulas; of the shared words those
    whose argument the method has.
    """
    text, has = " ".join(formulas), arguments(stem)
    shared = {tex: said for tex, said in words()["shared"].items() if len(said) == 2 or said[1] in has}
    known = {tex: said for tex, said in (shared | words().get(stem, {})).items() if is_in(tex, text)}
    found = [Symbol(tex, said[0], _shape(has, said[1:])) for tex, said in known.items()]
    return sorted(found, key=lambda one: text.index(one.tex))


def _shape(has: Mapping[str, Sequence[str]], said: Sequence[Any]) -> str:
    """`[D], of keys [B, H_kv, T, D]`: some of the last axes of an argument, or the words themselves."""
    if len(said) == 1:
        return str(said[0])
    name, count = said
    axes = has[name]
    own = f"[{', '.join(axes[len(axes) - count :])}]" if count else "a number"
    if not axes:
        return f"{own}: {name}"
    return f"{own}, of {name} [{', '.join(axes)}]"


def arguments(stem: str) -> dict[str, tuple[str, ...]]:
    """The arguments of a method's functions with the names of their axes, where they have most of them; a
    setting has none.
    """
    found: dict[str, tuple[str, ...]] = {}
    module = catalogue.modules()[stem]
    for _, function in inspect.getmembers(module, inspect.isfunction):
        own = function.__module__ == module.__name__
        for name, hint in get_type_hints(function, include_extras=True).items() if own else ():
            for said in [part for part in get_args(hint) if isinstance(part, Said)]:
                axes = (
                    ()
                    if said.kind == "setting"
                    else tuple(re.findall(r"(\S+?)(?:[<>%]\S*)?(?: |$)", said.text))
                )
                found[name] = max(found.get(name, ()), axes, key=len)
    return found


def listed(ids: str) -> str:
    """The list below the formulas of these requirements, which are of one method, as one line of HTML; empty
    where no words are known.
    """
    names = ids.split(", ")
    found = symbols(stem_of()[names[0]], [entries()[name].requirement.tex for name in names])
    items = "".join(symbol.element() for symbol in found)
    return items and (
        '<details class="aside symbols" data-search-exclude=""><summary>What the symbols are</summary>'
        f"<ul>{items}</ul></details>"
    )
