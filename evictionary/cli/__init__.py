"""The command `evictionary`: its subcommands share options and messages, and do not import one another."""
