"""The reports of docs/judging.md: `python -m docs_build.judging` runs the programs of the page and writes
what they are told.
"""

import re
import tempfile
from pathlib import Path

from docs_build.running import ROOT, said

PAGE = ROOT / "docs" / "judging.md"
# What each program of the page is called, and what it is judged with besides.
FOLDERS = (("my_homework", ""), ("my_kernels", ""), ("float32_kernels", "--dtype float32,float16,bfloat16"))


def written(markdown: str) -> str:
    """The page with the report of each program below it, without its seconds."""
    folders = iter(FOLDERS)

    def fill(match: re.Match[str]) -> str:
        return f"```python\n{match[1]}```\n{match[2]}```text\n{report(match[1], *next(folders))}\n```"

    return re.sub(
        r"^```python\n(.*?)^```\n(.*?)^```(?:text)?\n.*?^```$", fill, markdown, flags=re.DOTALL | re.MULTILINE
    )


def report(program: str, name: str, options: str) -> str:
    """What the program is told: the first failure, and the verdict."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        folder.mkdir()
        (folder / "keydiff.py").write_text(program, encoding="utf-8")
        command = (
            "pytest spec_tests/keydiff/test_keydiff.py --profile student -q -p no:cacheprovider --color=no"
        )
        printed = said(f"{command} --impl {folder} {options}", ROOT).replace(f"{temporary}/", "")
    failure = re.search(
        r"^KD-8 does not hold for .*?^  this law alone .*?$", printed, flags=re.DOTALL | re.MULTILINE
    )
    rows = printed.partition("verdict by requirement")[2].splitlines()[1:]
    verdict = "\n".join(row for row in rows if not row.startswith(("====", "FAILED")))
    return (f"{failure[0]}\n\n...\n\n" if failure else "") + verdict


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
