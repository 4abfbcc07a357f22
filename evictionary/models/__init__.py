"""Loads a model: the embedded one, a name on the Hugging Face hub, or a local folder."""
