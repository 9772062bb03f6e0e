"""The `headrace` command: one file a verb."""
