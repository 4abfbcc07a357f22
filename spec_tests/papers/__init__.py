"""The laws about the papers alone: theorems, counterexamples and recomputed tables. They judge no
implementation and run once.
"""
