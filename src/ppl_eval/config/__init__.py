"""The config surface, and the way from a command line to a checked config."""
