"""Finds the methods, and calls a method on the states of a layer."""
