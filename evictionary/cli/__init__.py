"""The command `evictionary`: an app of commands that share their options and messages, and import nothing of one another."""
