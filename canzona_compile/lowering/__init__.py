"""From decisions to one rank's code: graphs over stacks of tasks, streams, kernels, the program's builder."""
