"""The machinery behind the laws: what a law is, how an implementation is loaded and called, what counts as equal, the verdict."""
