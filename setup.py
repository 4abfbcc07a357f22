"""Which packages a wheel holds; everything else is in pyproject.toml.

reference/, optimized/, spec_tests/ and tutorials/ stand at the top of a clone, where a reader looks for them. They are imported and
installed as `evictionary.reference` and so on, so that no other project's `reference` is in their way, nor they in its.
"""

from setuptools import find_namespace_packages, setup

FOLDERS = ("reference", "optimized", "spec_tests", "tutorials")


def packages(*names: str) -> list[str]:
    return find_namespace_packages(include=[each for name in names for each in (name, f"{name}.*")], exclude=["*__pycache__*"])


setup(
    packages=[*packages("evictionary"), *(f"evictionary.{package}" for package in packages(*FOLDERS))],
    package_dir={f"evictionary.{folder}": folder for folder in FOLDERS},
)
