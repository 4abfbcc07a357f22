"""Correct but different implementations: other summation orders, tiles, float32 inside, torch. No law may raise an alarm on them.

A file per method, `controls/<stem>.py`. Together with the mutants they measure the laws in both directions.
"""
