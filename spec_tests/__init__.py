"""The laws: what an implementation must satisfy to be the method that its paper describes.

`pytest spec_tests/ --impl my_kernels` judges a package, a folder or one file. The oracle is `reference`; nothing here imports
`optimized`. Map: `test_<stem>.py` the laws that judge an implementation, `papers/` those about the papers alone,
`requirements/<stem>.toml` the equations that they hold to, `mutants/` planted mistakes, `controls/` correct variants; in `harness/`
`law.py` the decorator, `implementation.py` loading and calling what is judged, `cases.py` the inputs, `arithmetic.py` and
`tolerance.py` what counts as equal, `report.py` the sentence that a failure prints, `verdict.py` the verdict by requirement.
"""

if __name__ != "evictionary.spec_tests":
    raise ImportError("import evictionary.spec_tests, so that no module of it exists twice")
