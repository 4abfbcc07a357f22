"""Tasks, their evaluation with every method, and the reports."""
