"""Lessons: each file is a script that runs, and is rendered with what it prints when the site is built (`build.py`)."""
