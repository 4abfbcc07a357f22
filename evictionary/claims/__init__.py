"""The papers' empirical claims, measured on a real model: `evictionary claims`.

One module for each paper holds its claims, each with the rule that decides
it, the measurement and the picture. A rule is written before the measurement
and compares numbers with bounds; nobody chooses a verdict by hand.
"""
