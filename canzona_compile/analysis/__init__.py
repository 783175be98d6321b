"""What can be said of a graph without running it: work, time, algebra, symmetry, bounds."""
