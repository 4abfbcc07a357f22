"""Asks the search of a built site what readers ask, without a browser:
`python -m tests.site.site_search build/site`, part of `make docs`.

The search is the theme's own program, which the site has as a worker, and the site's script that rewrites a
question. Node.js runs both: playwright brings it.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import playwright
import typer

QUESTIONS: dict[str, str] = tomllib.loads(Path(__file__).with_name("questions.toml").read_text("utf-8"))[
    "first"
]
NODE = Path(playwright.__file__).parent / "driver" / "node"
SCRIPT = Path(__file__).parents[2] / "docs" / "assets" / "javascripts" / "search.js"

# Node.js has no workers of the web, so this is one: the search listens to it, and answers.
ASK = r"""
const [worker, script, input] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const answers = [];
let listen;
globalThis.self = globalThis;
globalThis.addEventListener = (kind, heard) => { listen = heard; };
globalThis.postMessage = (message) => answers.push(message);
globalThis.Worker = class { postMessage(message) { return listen({ data: message }); } };
(0, eval)(worker);
if (script) (0, eval)(script);
const page = new Worker();
(async () => {
  await page.postMessage({ type: 0, data: { ...input.index, options: { suggest: false } } });
  for (const question of input.questions) await page.postMessage({ type: 2, data: question });
  const pages = (answer) => answer.data.items.map((page) => page.map((hit) => hit.location));
  console.log(JSON.stringify(answers.slice(1).map(pages)));
})();
"""


def asked(
    worker: Path, index: dict[str, Any], questions: Sequence[str], script: Path | None = SCRIPT
) -> list[list[list[str]]]:
    """For each question the pages that the search finds, the best first: of each page the addresses of its
    sections that were hit, the best first.
    """
    programs = [path.read_text(encoding="utf-8") if path else None for path in (worker, script)]
    told = subprocess.run(
        [NODE, "-e", ASK],
        input=json.dumps([*programs, {"index": index, "questions": list(questions)}]),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(told.stdout)


def is_first(wanted: str, hits: Sequence[str]) -> bool:
    """Whether these hits of one page are those of the wanted one, and begin with the wanted section."""
    return hits[:1] == [wanted] if "#" in wanted else wanted in {hit.partition("#")[0] for hit in hits}


def wrong(found: dict[str, list[list[str]]]) -> list[str]:
    """The questions whose first page or section is not that of QUESTIONS."""
    return [
        f"{question!r} should find {QUESTIONS[question]}, and finds {[page[0] for page in pages[:3]]}"
        for question, pages in found.items()
        if not pages or not is_first(QUESTIONS[question], pages[0])
    ]


def worker_of(folder: Path) -> Path:
    """The theme's search: the worker in a folder of its scripts."""
    (worker,) = folder.glob("assets/javascripts/workers/search.*.js")
    return worker


def main(site: Annotated[Path, typer.Argument(help="The folder of the built site.")]) -> None:
    """Ask the search of the built site what readers ask."""
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    index = json.loads(script.removeprefix("var __index="))
    found = dict(zip(QUESTIONS, asked(worker_of(site), index, list(QUESTIONS)), strict=True))
    complaints = wrong(found)
    print("\n".join([*complaints, f"{len(QUESTIONS)} questions to the search; {len(complaints)} complaints"]))
    sys.exit(bool(complaints))


if __name__ == "__main__":
    typer.run(main)
