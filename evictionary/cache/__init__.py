"""A transformers cache that physically removes what a method does not keep."""
