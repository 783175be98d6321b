"""The hardware that a step runs on: its rates, the files that hold them, and how such files are read."""
