"""What long work is doing: a line on a terminal, and lines of the log."""
