"""The signatures of docs/reference/contract.md, for readers of the file itself: `python -m
docs_build.contract` writes them.
"""

import re
from pathlib import Path

from docs_build.pages import summary

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "contract.md"


def written(markdown: str) -> str:
    """The page with the signature of each function below its marker."""

    def fill(match: re.Match[str]) -> str:
        sentence, head = summary(match[1])
        return (
            f"<!-- signature: {match[1]} -->\n`{match[1]}`: {sentence}\n\n```python\n{head}\n```\n<!-- "
            "end -->"
        )

    return re.sub(
        r"^<!-- signature: (\S+) -->(?:\n(?:(?!<!--).*\n)+<!-- end -->)?$", fill, markdown, flags=re.MULTILINE
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
