"""Generates what the site shows of the code: the equations with their functions, kernels and laws, and the sources as pages."""
