"""Lessons: each file is a script that runs, and is rendered with what it prints by `python -m tutorials.build`."""
