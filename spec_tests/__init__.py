"""The laws: what an implementation must satisfy to be the method that its paper describes.

`pytest spec_tests/ --impl my_kernels` judges a package, a folder or one file. The oracle is
`reference`; nothing here imports `optimized`. A folder is the specification of one method
(`keydiff/`) or of what all share (`shared/`, `rope/`, `memory/`): `requirements.toml` the equations,
`test_<stem>.py` the laws that judge an implementation, `mutants.toml` planted mistakes, `variants.py`
correct variants, put together from the steps in `forms.py` where that exists. What proves things
about a paper and judges no implementation stands in `papers/`, with the tables that the papers print.
The machinery has three rooms: `judge/` draws inputs, calls what is judged and compares; `verdict/`
says what came of it; `proof/` measures the laws by the mistakes and the variants.
"""

if __name__ != "evictionary.spec_tests":
    raise ImportError("import evictionary.spec_tests, so that no module of it exists twice")
