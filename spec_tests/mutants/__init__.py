"""Planted wrong implementations: mistakes that people make, each with the law that must kill it and the misconception behind it.

`mutants/<stem>.toml` holds those that are edits of the right function, `mutants/<stem>.py` those that are programs of their own.
They measure the laws (every mutant must die by its own requirement) and they are the bank of misconceptions: when an implementation
fails with the numbers of a mutant, the report names that mistake.
"""
