"""Lessons: each file runs as a script, and the site shows it with its output (`build.py`)."""
