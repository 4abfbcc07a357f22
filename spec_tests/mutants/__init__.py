"""Planted wrong implementations: mistakes that people make, each with the law that must kill it and the misconception behind it.

A file per method, `mutants/<stem>.py`; a mutant is a function with the signature of the one it replaces, in NumPy, ten lines or so.
They measure the laws (every mutant must die by its own requirement) and they are the bank of misconceptions: when an implementation
fails with the numbers of a mutant, the report names that mistake.
"""
