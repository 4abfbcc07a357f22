"""What the tests share: no test, and no part of what is installed."""
