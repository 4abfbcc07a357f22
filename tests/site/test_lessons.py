"""Every lesson runs, every exercise can be solved and not by leaving it as it is, every page has what
belongs on it.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tools import refused, saved, says

from docs_build import pages, written
from evictionary.errors import InstallError
from evictionary.models import embedded
from evictionary.optimized import keydiff as operators
from evictionary.optimized.kernels import keydiff as kernels
from evictionary.reference import keydiff, selection
from evictionary.tutorials import lesson as lesson_module
from tutorials import build

LESSONS = build.lessons()
every_lesson = pytest.mark.parametrize(
    "lesson",
    [pytest.param(lesson, marks=pytest.mark.slow) for lesson in LESSONS],
    ids=lambda lesson: lesson.stem,
)


def page_of(lesson: Path) -> str:
    """The lesson's page; the lesson runs, and every exercise is put to its check, where no build of this
    code has run it yet.
    """
    return (build.built(lesson) / f"{lesson.stem}.md").read_text(encoding="utf-8")


@every_lesson
def test_a_lesson_runs_and_its_pictures_have_alternative_texts(lesson: Path) -> None:
    page = page_of(lesson)
    assert "![](" not in page
    shown = {line.split("](")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")}
    assert shown == {f"{lesson.stem}/{path.name}" for path in (build.built(lesson) / lesson.stem).iterdir()}
    assert len(shown) >= 2


def test_a_box_has_the_name_of_the_file_that_it_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes once had the name of the file with the decorator."""
    shown: list[Any] = []
    monkeypatch.setattr(lesson_module, "display", shown.append)
    lesson_module.show(keydiff.score, selection.top_k, operators.score, kernels.score_keys)
    titles = [re.findall(r'^```python title="(.+)"$', box.data, flags=re.MULTILINE) for box in shown]
    assert titles == [
        ["reference/keydiff.py"],
        ["reference/selection.py"],
        ["optimized/keydiff.py"],
        ["optimized/kernels/keydiff.py"],
    ]


@every_lesson
def test_a_lesson_quotes_what_the_named_file_has(lesson: Path) -> None:
    boxes = re.findall(r'^```python title="(.+?)"\n(.+?)\n```$', page_of(lesson), flags=re.DOTALL | re.M)
    for file, quoted in boxes:
        assert quoted in (lesson_module.ROOT / file).read_text(encoding="utf-8"), file


@every_lesson
def test_a_lesson_says_what_it_takes_asks_predicts_and_breaks_something(lesson: Path) -> None:
    text = lesson.read_text(encoding="utf-8")
    assert re.findall(r"^> \*\*(.+?)\*\* ", text, flags=re.MULTILINE) == [
        "You will learn",
        "Time",
        "You need",
    ]
    assert text.count("**Predict**") >= 3 and "goes wrong" in text and text.count("def check_") >= 2


each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)


@each_lesson
def test_a_lesson_opens_with_a_question_and_closes_with_what_you_know_two_checks_and_where_to_go(
    lesson: Path,
) -> None:
    text = lesson.read_text(encoding="utf-8")
    assert re.match(r"# .+\n\n\*\*.+\?\*\*\n", text)
    closing = ["Exercises", "What you now know", "Check yourself", "Where to go next"]
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE)[-4:] == closing
    known, checks, way = (part.partition("\n")[2] for part in text.split("\n## ")[-3:])
    assert 3 <= known.count("\n- ") <= 5
    # Each check is a question, then its answer: code, which runs with the lesson, or text behind a fold.
    asked = re.split(r"\n\*\*Check \d\.\*\* ", checks)[1:]
    assert len(asked) == 2
    for each in asked:
        question, fold, answer = re.split(
            r'(\n```python tags=\["answer"\]\n|\n<details .+</summary>\n)', each
        )
        assert "?" in question and fold and answer.strip()
    assert way.strip().startswith("More: ")


@each_lesson
def test_a_lesson_needs_only_lessons_before_it(lesson: Path) -> None:
    """So the numbers are an order in which to read."""
    (needed,) = re.findall(
        r"^> \*\*You need\*\* (.+)$", lesson.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert all(f"{name}.md" < lesson.name for name in re.findall(r"\]\((\d\d_\w+)\.md\)", needed))


def test_a_link_to_a_lesson_says_its_number() -> None:
    pages = [*build.ROOT.glob("tutorials/**/*.md"), *build.ROOT.glob("docs/**/*.md")]
    links = re.compile(r"\[[Ll]esson\s+(\d+)[^\]]*\]\([\w./]*?(\d\d)_\w+\.md\)")
    said = [(page.name, *each) for page in pages for each in links.findall(page.read_text(encoding="utf-8"))]
    assert len(said) > 60
    assert [each for each in said if int(each[1]) != int(each[2])] == []


def test_an_earlier_address_leads_to_its_lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lesson in LESSONS:
        saved(tmp_path / f"{lesson.stem}.ipynb", lesson.stem)
    monkeypatch.setattr(written, "built", lambda lesson: tmp_path)
    monkeypatch.setattr(written, "lesson_folders", list)
    files = {name: content for name, content in written.contents() if name.startswith("lessons/")}
    assert len(build.EARLIER) == 12 and not {*build.EARLIER} & {lesson.stem for lesson in LESSONS}
    for name in build.EARLIER:
        (lesson,) = [each for each in LESSONS if each.stem[2:] == name[2:]]
        says(
            files[f"lessons/{name}.html"],
            f'location.replace("{lesson.stem}.html" + location.hash)',
            f'url={lesson.stem}.html"',
            f'<a href="{lesson.stem}.html">{int(lesson.stem[:2])}. ',
        )
        (cell,) = json.loads(files[f"lessons/{name}.ipynb"])["cells"]
        says("".join(cell["source"]), f"]({lesson.stem}.ipynb).")


@pytest.mark.slow
def test_what_the_lesson_on_quantised_caches_says_of_its_numbers() -> None:
    """The sentences around the outputs: which rounding is
    better and why, and what moves less than an eviction.
    """
    page = page_of(build.ROOT / "tutorials" / "18_quantised_caches.md")

    def numbers(line: str) -> list[float]:
        (rest,) = re.findall(rf"^{line}(.*)$", page, flags=re.MULTILINE)
        return [float(each) for each in re.findall(r"\d+\.\d+", rest)]

    token, channel = numbers("by_token +keys: numbers"), numbers("by_channel +keys: numbers")
    assert [by_channel < by_token for by_channel, by_token in zip(channel, token, strict=True)] == [
        *(True, True),  # of keys the numbers and the output
        *(True, False),  # of values
    ]
    keys, values = (max(numbers(name)) / min(numbers(name)) for name in ("keys: channel", "values: channel"))
    assert round(keys) == 18 and values < 2
    by_token, rotated, by_channel = (
        numbers(f"keys of the model in four bits, {way} +error")[0]
        for way in ("by token", "rotated, by token", "by channel")
    )
    assert by_channel < rotated < by_token
    first, median = numbers("the first token has.+length")
    assert first < median / 2
    # The first value alone explains the difference.
    (without,) = numbers("values by channel, the first exact: output")
    assert abs(without - token[3]) < 0.02 < channel[3] - token[3]
    moved = {
        name: numbers(f"{name} +\\d+% of the bytes:")[0]
        for name in ("4 bits", "2 bits", "4 bits, rotated", "keydiff", "snapkv", "h2o")
    }
    evicted = [moved[name] for name in ("keydiff", "snapkv", "h2o")]
    assert max(moved["4 bits"], moved["4 bits, rotated"]) < min(evicted) / 4 and moved["2 bits"] < min(
        evicted
    )


@every_lesson
def test_a_page_has_its_number_folds_what_is_to_be_folded_and_answers_every_question(lesson: Path) -> None:
    text, page = lesson.read_text(encoding="utf-8"), page_of(lesson)
    assert page.startswith(f"# {int(lesson.stem[:2])}. ")
    wanted = {
        "\n{ .predict }\n": text.count("**Predict**"),
        "<summary>What it gives</summary>": text.count("**Predict**"),
        "<summary>What is imported</summary>": 1,
        "<summary>How it is drawn</summary>": text.count('tags=["drawing"'),
        "<summary>A solution</summary>": text.count("def check_"),
        "<summary>The answer</summary>": 2,
    }
    assert {part: page.count(part) for part in wanted} == wanted


def test_a_prediction_folds_its_answer_with_the_picture_and_the_paragraph_about_it(
    lesson: Path,
) -> None:
    """The sentence below a fold once said what it hid."""
    predicts = """
**Predict** How much is it?

```python tags=["predict"]
print(it(7))
```

```python tags=["drawing"] alt="A line"
import matplotlib.pyplot as plt
plt.plot([1, 2])
plt.show()
```

Seven, as it was.

And what is behind it?
"""
    saved(lesson, RIGHT + predicts)
    page = (build.built(lesson) / "01_made_up.md").read_text(encoding="utf-8")
    _, _, below = page.partition("<summary>What it gives</summary>")
    places = [below.index(part) for part in ("7", "How it is drawn", "![A line](", "Seven, as it was.")]
    end = below.replace("</details>", "<detail.>", 1).index("</details>")  # the first one is the drawing's
    assert places == sorted(places) and places[-1] < end < below.index("And what is behind it?")


@every_lesson
def test_no_picture_stands_right_below_a_fold_with_an_answer(lesson: Path) -> None:
    (_, *parts) = page_of(lesson).split("<summary>What it gives</summary>")
    for part in parts:
        inner = re.sub(r"<details[\s\S]*?</details>", "", part)
        after = inner.partition("</details>")[2]
        assert not after.lstrip().startswith("!["), after[:200]


@every_lesson
def test_the_notebook_for_download_has_no_outputs(lesson: Path) -> None:
    cells = json.loads((build.built(lesson) / f"{lesson.stem}.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs")]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_downloaded_lesson_imports_what_is_installed(lesson: Path) -> None:
    """Outside a clone there is no `tutorials`, only `evictionary.tutorials`."""
    wanted = "from evictionary.tutorials.lesson import"
    says(lesson.read_text(encoding="utf-8"), wanted, never=["\nfrom tutorials"])


@pytest.mark.parametrize(
    ("lesson", "following"), list(itertools.pairwise(LESSONS)), ids=lambda lesson: lesson.stem
)
def test_a_lesson_leads_to_the_next_one(lesson: Path, following: Path) -> None:
    assert f"]({following.stem}.md)" in lesson.read_text(encoding="utf-8").rpartition("Next:")[2]


def test_the_path_has_each_lesson_once_with_its_question_and_its_time() -> None:
    index = pages.filled(
        "lessons/index.md", (build.ROOT / "docs" / "lessons" / "index.md").read_text(encoding="utf-8")
    )
    assert sorted(re.findall(r"\]\((\d\S+)\) \| .+\? \| \d+ minutes \|$", index, flags=re.M)) == [
        f"{lesson.stem}.md" for lesson in LESSONS
    ]


RIGHT = """# A lesson

```python
def check_it(answer): assert answer(2) == 4
def it(x): return x
def solution_it(x): return 2 * x
```
"""


@pytest.fixture
def lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lesson of a few lines, which is built in a folder of its own and needs no model."""
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    monkeypatch.setattr(build, "SOURCES", ())
    monkeypatch.setattr(embedded, "install", lambda: None)
    return saved(tmp_path / "01_made_up.md", RIGHT)


def test_a_lesson_is_run_again_only_after_a_change(lesson: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Mock()
    monkeypatch.setattr(build, "_run", ran)
    assert not build.is_built(lesson)
    folder = build.built(lesson)
    assert build.is_built(lesson) and build.built(lesson) == folder
    assert {path.name for path in folder.iterdir()} == {"01_made_up.md", "01_made_up.ipynb", "made_from"}
    lesson.write_text(RIGHT + "\nMore.\n", encoding="utf-8")
    assert not build.is_built(lesson)
    build.built(lesson)
    assert ran.call_count == 2


def test_a_notebook_opens_in_colab_where_the_repository_is_on_github(
    lesson: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_run", lambda notebook, lesson: None)
    monkeypatch.setattr(build, "REPOSITORY", "https://github.com/someone/a.name")
    for path, words in (
        (
            build.built(lesson) / "01_made_up.md",
            "[Open it in Colab](https://colab.research.google.com/github/someone/a.name/blob/notebooks/",
        ),
        (
            build.built(lesson) / "01_made_up.ipynb",
            '%pip install -q \\"evictionary[docs] @ git+https://github.com/someone/a.name\\"',
        ),
        (build.ROOT / ".github" / "workflows" / "pages.yml", "HEAD:refs/heads/notebooks\n"),
    ):
        says(path.read_text(encoding="utf-8"), words)
    monkeypatch.setattr(build, "REPOSITORY", "https://example.org/someone/a.name")
    assert "Colab" not in (build.built(lesson) / "01_made_up.md").read_text(encoding="utf-8")


def test_a_notebook_shows_no_warning_of_a_library_that_draws_progress(
    lesson: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, shown = build._run, []

    def watched(notebook: Any, lesson: Path) -> None:
        run(notebook, lesson)
        shown.extend(each for cell in notebook.cells for each in cell.get("outputs", []))

    monkeypatch.setattr(build, "_run", watched)
    saved(lesson, RIGHT.replace("def it(x)", "from tqdm.auto import tqdm\nprint(tqdm)\ndef it(x)"))
    build.built(lesson)
    assert [each["name"] for each in shown] == ["stdout"]


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("return 2 * x", "return 3 * x", "AssertionError"),
        ("return x", "return 2 * x", "the untouched exercise it passes its check"),
        ("check_it", "look_at", "the lesson has no exercise"),
        ("return 2 * x", "return 2 * x\n1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_lesson_that_is_not_right_is_not_built(lesson: Path, was: str, now: str, said: str) -> None:
    saved(lesson, RIGHT.replace(was, now, 1))
    refused(lambda: build.built(lesson), f"01_made_up.md cannot be run: .*{said}", build.LessonError)
    assert not build.is_built(lesson)


def test_without_the_model_the_build_of_the_site_says_so_in_one_sentence(
    lesson: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = InstallError("the embedded model could not be downloaded\nno network")
    monkeypatch.setattr(embedded, "install", Mock(side_effect=error))
    monkeypatch.setattr(written, "lessons", lambda: [lesson])
    message = r"\A01_made_up\.md cannot be run: the embedded model could not be downloaded no network\Z"
    refused(written.lesson_folders, message, build.LessonError)
