"""Generates the site's pages about the code: the equations with their functions, kernels and laws, and the
sources as pages.
"""
