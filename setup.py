"""The packages that setuptools installs; pyproject.toml has all else.

`reference/`, `optimized/`, `spec_tests/` and `tutorials/` are on top, where a reader looks for them. Links in
`evictionary/` make them its subpackages, so that no other project's `reference` is in their way. Where Git
makes no links, as on Windows, a link is a file with the name of its folder, and the folder is taken as it is.
"""

import os
import sys

from setuptools import find_namespace_packages, setup

LINKED = ("optimized", "reference", "spec_tests", "tutorials")

without_link = [name for name in LINKED if not os.path.isdir(f"evictionary/{name}")]
if missing := [name for name in without_link if not os.path.isdir(name)]:
    sys.exit(f"the folders {', '.join(missing)} are missing beside evictionary/: install from a whole clone")
apart = [f"{name}.{inner}" for name in without_link for inner in ["", *find_namespace_packages(name)]]
setup(
    packages=find_namespace_packages(include=["evictionary*"])
    + [f"evictionary.{name}".rstrip(".") for name in apart],
    package_dir={f"evictionary.{name}": name for name in without_link},
)
