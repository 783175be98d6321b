"""The contract that a distributed optimizer keeps, and its check: an optimizer in miniature, stepped plainly and apart.

1. A step reads and writes the parameter, its gradient, `state[p]`, its group, and plain numbers on `self`.
2. It treats a parameter alike whatever else is in the list.
3. It has the same effect on a copy of the optimizer with other parameters.
4. What it keeps per parameter it keeps in `state[p]`.
5. It draws no random numbers, or draws them from torch's own generators, for one parameter after the other.

A rehearsal steps all parameters together, as the user wrote it, and then each on a twin that sees it alone. Equal bits
mean that the contract is kept, as far as these steps show. Whoever breaks line 3 or 4 may give each matrix an optimizer
object of its own (`one_per_matrix=`), which needs no rehearsal: it steps that matrix alone.
"""
