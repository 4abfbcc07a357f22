"""Rulers of what a reader feels: what stands before a formula, how many functions an answer takes.

    python -m tests.rulers          # the table of docs/rulers.md
    python -m tests.rulers --json   # the same, and what each figure is made of

A ruler reads the code with `ast` and counts. tests/test_rulers.py holds those that have a bound. The others
are shown beside what they were at 2ee6f8ed, when the project had a budget of statements in their place.
"""

import argparse
import ast
import functools
import heapq
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("optimized", "reference", "spec_tests", "tutorials")
"""The folders on top that are imported as `evictionary.<folder>`."""
MAIN = ("score", "select")
"""The main function of a method, which a cache calls, is the first of these in its file."""
MACHINERY = ("checks", "contract")
"""The files of reference/ that refuse arguments and read signatures; the others are mathematics."""
SHELVES = ("reference", "optimized", "optimized/kernels", "optimized/teaching", "evictionary/policies")
"""Where a method has files of its name, beside its folder in spec_tests/ and its paper's laws."""
EXAMPLE = "keydiff"


class Ruler(NamedTuple):
    """A figure: what it was at 2ee6f8ed, what it is today, and at most what it may be.

    `before` is what the same ruler says of that commit. `made_of` is what the figure of today counts.
    """

    what: str
    before: float
    today: float
    most: float | None = None
    made_of: Any = None

    @property
    def holds(self) -> bool:
        return self.most is None or self.today <= self.most


@functools.cache
def rulers(root: Path = ROOT) -> list[Ruler]:
    """All rulers, for the tree in this folder. Lower a bound where the code has become better."""
    code = Code(root)
    return [*of_formulas(code), *of_questions(code), *of_a_new_method(code), *of_the_library(code)]


def of_formulas(code: "Code") -> list[Ruler]:
    """Where the formula of a method is in its file, and what is around the formulas."""
    above = {name: lines_above_formula(code, name) for name in methods(code)}
    later = [name for name in methods(code) if main_function(code, name) != functions_of(code, name)[0]]
    lines = kinds_of_lines(code)
    share = {kind: round(100 * count / lines.total()) for kind, count in lines.items()}
    return [
        Ruler("Lines above the first formula of a method, median", 32, median(above.values()), made_of=above),
        # a screen has some 50 lines: the formula of every method is on the first one
        Ruler("Lines above the first formula of a method, the most", 46, max(above.values()), most=50),
        Ruler("Methods whose main function is not the first of their file", 0, len(later), 0, later),
        Ruler(
            "Lines of mathematics in functions of `reference/`, %", 33, share["mathematics"], made_of=lines
        ),
        Ruler("Lines of docstrings in them, %", 42, share["docstring"]),
        Ruler("Lines of signatures in them, %", 18, share["signature"]),
        Ruler("Lines of checks in them, %", 3, share["check"], most=3),
    ]


def of_questions(code: "Code") -> list[Ruler]:
    """How many functions and files are on the way to an answer."""
    rules = {name: functions_of_the_rule(code, name) for name in methods(code)}
    functions = [len(rule) for rule in rules.values()]
    law = way_of_a_law(code)
    ways = {name: way for name in methods(code) if (way := way_to_the_kernel(code, name))}
    keydiff = ways.get(EXAMPLE, [])
    steps = [len(way) for way in ways.values()]
    return [
        Ruler("What is the rule of KeyDiff? Functions", 4, len(rules[EXAMPLE]), 4, rules[EXAMPLE]),
        Ruler("What is the rule of KeyDiff? Files", 1, len(files(rules[EXAMPLE])), 1),
        Ruler("What is the rule of a method? Functions, median", 6, median(functions), made_of=rules),
        Ruler("How do I try a scorer? Lines of its one file", 3, lines_of_a_scorer(code.root), most=5),
        Ruler("Why did a law of KeyDiff fail? Files up to what it allows", 5, len(files(law)), 5, law),
        Ruler("Where is a kernel of KeyDiff launched? Functions", 8, len(keydiff), 4, keydiff),
        Ruler("Where is a kernel of KeyDiff launched? Files", 3, len(files(keydiff)), 2),
        Ruler("Where is a kernel of a method launched? Functions, median", 6, median(steps or [0]), 4, ways),
        Ruler("Where is a kernel of a method launched? Functions, the most", 8, max(steps, default=0), 5),
    ]


def of_a_new_method(code: "Code") -> list[Ruler]:
    """What a new method costs: the example of the recipe, and the methods that are here."""
    example = [path for path in sorted((code.root / "tests" / "a_new_method").rglob("*.*")) if path.is_file()]
    recipe = (code.root / "docs" / "reference" / "add_a_method.md").read_text(encoding="utf-8")
    own = {name: lines_under_the_name(code, name) for name in methods(code)}
    return [
        Ruler("What does a new method take? Files of the example", 9, len(example), 7, example),
        Ruler("What does a new method take? Lines of the example", 175, sum(map(lines_of, example)), 100),
        Ruler("What does a new method take? Words of the recipe", 934, len(recipe.split())),
        Ruler("Lines of Python and TOML of a method, median", 892, median(own.values()), made_of=own),
    ]


def of_the_library(code: "Code") -> list[Ruler]:
    """What a user meets, and whether files can be read one after the other."""
    circles = circles_of_imports(code)
    ours = public_names()
    return [
        Ruler("Public names of a cache beside those of transformers", 36, len(ours), 21, ours),
        Ruler("Modules in a circle of imports, those for types too", 8, sum(map(len, circles)), 0, circles),
    ]


# The code, read
# ------------------------------------------------------------------------------------------------------------


class Definition(NamedTuple):
    """A function or a class: its module and its name, with a dot for a method; no name for the module."""

    module: str
    name: str


class Module:
    """A file: what it defines, and what it imports, also inside of functions and for types alone."""

    def __init__(self, name: str, path: Path) -> None:
        self.package = name if path.stem == "__init__" else name.rpartition(".")[0]
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.defined: dict[str, ast.FunctionDef | ast.ClassDef] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.defined[node.name] = node
            if isinstance(node, ast.ClassDef):
                methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef))
                self.defined |= {f"{node.name}.{inner.name}": inner for inner in methods}
        self.imports = [*self._imports()]
        self.imported = {name: source for name, source in self.imports if name != "*"}

    def _imports(self) -> Iterator[tuple[str, Definition]]:
        """Each name that is imported, `*` for all of a module, and what it is there."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    yield each.asname or each.name, Definition(each.name, "")
            elif isinstance(node, ast.ImportFrom):
                for each in node.names:
                    name = "" if each.name == "*" else each.name
                    yield each.asname or each.name, Definition(self._source(node), name)

    def _source(self, node: ast.ImportFrom) -> str:
        """The full name of the module that an import is from."""
        parts = self.package.split(".")
        above = parts[: len(parts) - node.level + 1] if node.level else []
        return ".".join([*above, *([node.module] if node.module else [])])


class Code:
    """The modules of the package in a folder, by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        places = [(root / "evictionary", "evictionary")]
        places += [(root / folder, f"evictionary.{folder}") for folder in LINKED]
        self.modules: dict[str, Module] = {}
        for folder, package in places:
            for path in sorted(folder.rglob("*.py")):
                inside = path.relative_to(folder).with_suffix("").parts
                if not (package == "evictionary" and inside[0] in LINKED):
                    name = ".".join([package, *inside]).removesuffix(".__init__")
                    self.modules[name] = Module(name, path)

    def node(self, definition: Definition) -> Any:
        return self.modules[definition.module].defined[definition.name]

    def find(self, module: str, name: str) -> list[Definition]:
        """The way to what a name means in a module: the modules that hand it on, then the definition; none
        for a name that is not of this code.
        """
        if f"{module}.{name}" in self.modules:
            return [Definition(f"{module}.{name}", "")]
        if module not in self.modules:
            return []
        here = self.modules[module]
        if name in here.defined:
            return [Definition(module, name)]
        if name in here.imported:
            return self._handed_on(*here.imported[name])
        stars = [source.module for each, source in here.imports if each == "*"]
        return next(filter(None, (self._handed_on(star, name) for star in stars)), [])

    def _handed_on(self, source: str, name: str) -> list[Definition]:
        """The way to what a module gives, through that module where it has imported it itself."""
        if source in self.modules and not name:
            return [Definition(source, "")]
        way = self.find(source, name)
        is_its_own = f"{source}.{name}" in self.modules or way == [Definition(source, name)]
        return way if is_its_own or not way else [Definition(source, ""), *way]

    def members(self, way: list[Definition], names: list[str]) -> list[Definition]:
        """The way on to what a module or a class has under a name, and that under the next one."""
        for name in names:
            if not way:
                break
            *before, owner = way
            method = Definition(owner.module, f"{owner.name}.{name}")
            if not owner.name:
                way = [*before, *self._handed_on(owner.module, name)]
            else:
                way = [*before, method] if method.name in self.modules[owner.module].defined else []
        return way


def mentioned(code: Code, definition: Definition) -> Iterator[list[Definition]]:
    """The ways from a function to each definition that its body mentions."""
    node = code.node(definition)
    if not isinstance(node, ast.FunctionDef):
        return
    module, types = definition.module, annotations(node)
    local = {*types, *(each.id for each in ast.walk(node) if is_stored(each))}
    for found in (each for statement in node.body for each in ast.walk(statement)):
        match dotted(found):
            case [name] if name not in local:
                yield code.find(module, name)
            case [owner, *names] if names:
                meant = types.get(owner, "") if owner in local else owner  # the class of an argument
                way = code.find(module, meant)
                yield code.members(way, names) or way_through_launchers(
                    code, module, values_of(node, owner), names[0]
                )


def dotted(node: ast.AST) -> list[str]:
    """The names of `kernels.keydiff.score`, one after the other; none for an expression of another kind."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name) if before := dotted(value):
            return [*before, name]
    return []


def annotations(node: ast.FunctionDef) -> dict[str, str]:
    """The arguments of a function, each with the name of its class, or an empty text."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {each.arg: ast.unparse(each.annotation) if each.annotation else "" for each in arguments}


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def values_of(node: ast.AST, variable: str) -> list[ast.expr]:
    """What a function assigns to a variable."""
    values = []
    for found in ast.walk(node):
        match found:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == variable:
                values.append(value)
            case ast.NamedExpr(target=ast.Name(id=name), value=value) if name == variable:
                values.append(value)
    return values


def shortest_way(code: Code, start: Definition, is_end: Callable[[Definition], bool]) -> list[Definition]:
    """The fewest definitions that lead from one to another, each mentioned by the one before it; none where
    no way leads there.
    """
    waiting, seen = [(1, [start])], set()
    while waiting:
        _, way = heapq.heappop(waiting)
        if is_end(way[-1]):
            return way
        if way[-1] not in seen and way[-1].name:
            seen.add(way[-1])
            for on in filter(None, mentioned(code, way[-1])):
                heapq.heappush(waiting, (len(way) + len(on), [*way, *on]))
    return []


def files(way: Iterable[Definition]) -> set[str]:
    return {definition.module for definition in way}


# The measures
# ------------------------------------------------------------------------------------------------------------


def methods(code: Code) -> list[str]:
    """The methods: the files of reference/ that say in METHOD which tokens they keep."""
    says = re.compile(r"^METHOD = ", re.MULTILINE)
    files = sorted((code.root / "reference").glob("*.py"))
    return [path.stem for path in files if says.search(path.read_text(encoding="utf-8"))]


def functions_of(code: Code, method: str) -> list[str]:
    """The functions of a method's file, in its order."""
    defined = code.modules[f"evictionary.reference.{method}"].defined
    return [name for name, node in defined.items() if isinstance(node, ast.FunctionDef) and "." not in name]


def main_function(code: Code, method: str) -> str:
    return next(name for name in functions_of(code, method) if name in MAIN)


def lines_above_formula(code: Code, method: str) -> int:
    """The lines of a file above the first statement of its main function that computes."""
    node = code.node(Definition(f"evictionary.reference.{method}", main_function(code, method)))
    return next(statement.lineno for statement in statements(node) if not is_check(statement)) - 1


def statements(node: ast.FunctionDef) -> list[ast.stmt]:
    """The body of a function without its docstring."""
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def is_check(statement: ast.stmt) -> bool:
    """Whether a statement refuses arguments: `if ...: raise`, or a call such as `require_window(...)`."""
    match statement:
        case ast.If(body=body, orelse=[]):
            return all(isinstance(each, ast.Raise) for each in body)
        case (
            ast.Expr(value=ast.Call(func=ast.Name(id=name)))
            | ast.Assign(value=ast.Call(func=ast.Name(id=name)))
        ):
            return name.startswith(("require", "as_"))
    return False


def kinds_of_lines(code: Code) -> Counter[str]:
    """How many lines of the functions of reference/ are of each kind: `_kinds_in` names them."""
    kinds: Counter[str] = Counter()
    for name, module in code.modules.items():
        if re.fullmatch(rf"evictionary\.reference\.(?!{'|'.join(MACHINERY)}$)\w+", name):
            lines = module.text.splitlines()
            for node in module.defined.values():
                if isinstance(node, ast.FunctionDef):
                    kinds += _kinds_in(node, lines)
    return kinds


def _kinds_in(node: ast.FunctionDef, lines: list[str]) -> Counter[str]:
    """The kinds of the lines of one function."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last, body = node.end_lineno or node.lineno, node.body[0].lineno
    said = (node.body[0].end_lineno or body) + 1 - body if ast.get_docstring(node) is not None else 0
    inside = range(body + said, last + 1)
    comments = sum(not (line := lines[number - 1].strip()) or line.startswith("#") for number in inside)
    checks = sum((each.end_lineno or 0) + 1 - each.lineno for each in statements(node) if is_check(each))
    return Counter(
        signature=body - first,
        docstring=said,
        check=checks,
        comment=comments,
        mathematics=len(inside) - comments - checks,
    )


def functions_of_the_rule(code: Code, method: str) -> list[Definition]:
    """The functions of reference/ that the main function of a method calls, and those that these call."""
    found = [Definition(f"evictionary.reference.{method}", main_function(code, method))]
    for definition in found:  # which grows meanwhile
        for *_, other in filter(None, mentioned(code, definition)):
            is_mathematics = other.name and other.module.split(".")[-1] not in MACHINERY
            if is_mathematics and other not in found and isinstance(code.node(other), ast.FunctionDef):
                found.append(other)
    return found


def way_of_a_law(code: Code) -> list[Definition]:
    """The way from the first law of KeyDiff to the function that measures what a law allows."""
    laws = f"evictionary.spec_tests.{EXAMPLE}.test_{EXAMPLE}"
    first = next(name for name in code.modules[laws].defined if name.startswith("test_"))
    allowed = Definition("evictionary.spec_tests.judge.tolerance", "allowance")
    return shortest_way(code, Definition(laws, first), lambda definition: definition == allowed)


KERNELS = "evictionary.optimized.kernels"


def way_to_the_kernel(code: Code, method: str) -> list[Definition]:
    """The way from the main function of a method in optimized/ to a kernel of Triton, if there is one."""
    start = Definition(f"evictionary.optimized.{method}", main_function(code, method))
    is_there = start.module in code.modules and start.name in code.modules[start.module].defined
    return shortest_way(code, start, lambda definition: is_kernel(code, definition)) if is_there else []


def is_kernel(code: Code, definition: Definition) -> bool:
    decorators = code.node(definition).decorator_list if definition.name else []
    return any("triton.jit" in ast.unparse(decorator) for decorator in decorators)


def way_through_launchers(code: Code, module: str, values: list[ast.expr], name: str) -> list[Definition]:
    """The way to a launcher of a variable that `kernels_for("keydiff", ...)` or the like gave: the functions
    that find the file of kernels, then the launcher.
    """
    for call in (each for value in values for each in ast.walk(value) if isinstance(each, ast.Call)):
        way, stem = finding_kernels(code, module, call)
        if stem and (launcher := code.find(f"{KERNELS}.{stem}", name)):
            return [*way, *launcher]
    return []


def finding_kernels(
    code: Code, module: str, call: ast.Call, passed: tuple[Definition, ...] = ()
) -> tuple[list[Definition], str]:
    """The functions that a call leads through to what it returns, and the file of kernels that one of them
    is given by name, or an empty text.
    """
    way = code.find(module, call.func.id) if isinstance(call.func, ast.Name) else []
    given = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
    stem = next((each for each in given if f"{KERNELS}.{each}" in code.modules), "")
    if not way or not way[-1].name or way[-1] in passed:
        return [], stem
    for inner in returned_calls(code.node(way[-1])):
        further, other = finding_kernels(code, way[-1].module, inner, (*passed, *way))
        if further:
            return [*way, *further], stem or other
    return way, stem


def returned_calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls whose result a function returns, by way of a variable too; none for a class."""
    if isinstance(node, ast.FunctionDef):
        values = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
        for each in [*values]:
            values += values_of(node, each.id) if isinstance(each, ast.Name) else []
        yield from (each for value in values for each in ast.walk(value) if isinstance(each, ast.Call))


def lines_of_a_scorer(root: Path) -> int:
    """The lines of the file that the page shows who brings a method of one's own."""
    page = (root / "docs" / "in_a_model.md").read_text(encoding="utf-8")
    section = page.partition("## A method of your own")[2]
    return len(section.partition("```python\n")[2].partition("```")[0].splitlines())


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_under_the_name(code: Code, method: str) -> int:
    """The lines of Python and TOML in files of a method's name, in every layer."""
    own = re.compile(rf"{method}(_\w+)?\.py")
    about_its_paper = re.compile(rf"test_{method}_(paper|tables)\.py")
    specification = code.root / "spec_tests"
    found = [
        path for shelf in SHELVES for path in (code.root / shelf).glob("*.py") if own.fullmatch(path.name)
    ]
    found += [path for path in (specification / method).glob("*") if path.suffix in (".py", ".toml")]
    found += [path for path in (specification / "papers").glob("*") if about_its_paper.fullmatch(path.name)]
    return sum(map(lines_of, found))


def public_names() -> list[str]:
    """The public names of an `EvictingCache` in use, without those that a cache of transformers has: the set
    that a test holds.
    """
    tree = ast.parse((ROOT / "tests/cache/test_public_names.py").read_text(encoding="utf-8"))
    (promised,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PROMISED"
    ]
    return sorted(ast.literal_eval(promised))


def circles_of_imports(code: Code) -> list[list[str]]:
    """The modules of each circle of imports, with those for types alone."""
    known = code.modules
    reached = {name: _reached(known, name) for name in known}
    circles = {
        tuple(other for other in sorted(reached[name]) if name in reached[other])
        for name in known
        if name in reached[name]
    }
    return [list(circle) for circle in sorted(circles)]


def _reached(modules: dict[str, Module], name: str) -> set[str]:
    """The modules that a module imports, and those that they import."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for _, (source, other) in modules[waiting.pop()].imports:
            target = f"{source}.{other}" if f"{source}.{other}" in modules else source
            if target in modules and target not in found:
                found.add(target)
                waiting.append(target)
    return found


# The table
# ------------------------------------------------------------------------------------------------------------


def markdown(found: list[Ruler]) -> str:
    """The rulers as a table."""
    rows = [
        f"| {each.what} | {each.before:,g} | {each.today:,g} | "
        + ("-" if each.most is None else f"{each.most:,g}")
        + " |"
        for each in found
    ]
    return "\n".join(["| what is measured | at 2ee6f8ed | today | at most |", "|---|--:|--:|--:|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="what each figure is made of, too")
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="another checkout to measure; its classes are ours"
    )
    given = parser.parse_args()
    found = rulers(given.root.resolve())
    if given.json:
        print(json.dumps([each._asdict() for each in found], indent=2, default=str))
    else:
        print(markdown(found))


if __name__ == "__main__":
    main()
