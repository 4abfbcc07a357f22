"""Loads a model: the embedded one, one of the hub, or one of a folder."""
