"""Implementations by others, put to the laws by small adapters. Their code is brought from its public
place and never kept here.
"""
