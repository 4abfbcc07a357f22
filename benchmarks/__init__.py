"""Benchmarks: each is a module to run, prints a table,
and stores its result as JSON in `benchmarks/results/`.
"""
