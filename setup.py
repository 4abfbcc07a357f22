"""Which packages a wheel holds; everything else is in pyproject.toml.

reference/, optimized/, spec_tests/ and tutorials/ stand at the top of a clone, where a reader looks for them. They are imported and
installed as `evictionary.reference` and so on, so that no other project's `reference` is in their way, nor they in its.
"""

from setuptools import find_packages, setup

FOLDERS = ("reference", "optimized", "spec_tests", "tutorials")
inside = find_packages(include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")])

setup(
    packages=[*find_packages(include=["evictionary", "evictionary.*"]), *(f"evictionary.{package}" for package in inside)],
    package_dir={f"evictionary.{folder}": folder for folder in FOLDERS},
)
