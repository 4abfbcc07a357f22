"""Implementations by others, judged through small adapters. Their code is brought from its public
place and never kept here.
"""
