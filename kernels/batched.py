"""Lists the decompositions that gain by a batched call on CUDA, by version of torch, with the reason beside each line.

Measured rates of the device override the table: `eigh` and `eigh_batched`, and the like, of
`canzona_compile.machine.hardware`. On CPU torch's batched decompositions are a loop over LAPACK, so nothing is gained
there.
"""

from __future__ import annotations

from dataclasses import dataclass

ANY = 1 << 30


@dataclass(frozen=True, slots=True)
class StackedCase:
    """A case in which one call for a stack is faster than a call per matrix.

    Attributes:
        operator: its name without `linalg_`.
        torch: the first and the last minor version of torch 2 for which the case holds.
        largest: the number of rows up to which the case holds.
        why: what torch does then, and who measured what.
    """

    operator: str
    torch: tuple[int, int]
    largest: int
    why: str


# Above `largest` torch loops over a stack; a stacked call would only add the copies into the stack and out of it.
TABLE = (
    StackedCase("eigh", (0, 11), 32, "syevjBatched up to 32 rows, then a loop of syevd: pytorch#62003, pytorch#175585"),
    StackedCase(
        "eigh", (12, ANY), ANY, "a batched call for every size: pytorch#175403; 500 x 100^2: 914 -> 8.4 ms, #174674"
    ),
    StackedCase(
        "qr", (0, ANY), 256, "geqrfBatched up to 256 rows (pytorch#56253); orgqr loops in C++ (pytorch#143281)"
    ),
    StackedCase("cholesky_ex", (0, ANY), ANY, "potrfBatched: pytorch#57788; 7x at 16 x 512^2, ml-explore/mlx#4208"),
    StackedCase("solve_triangular", (0, ANY), ANY, "torch takes trsmBatched where it is the faster one: pytorch#53147"),
)


def gains(operator: str, rows: int, version: str) -> bool:
    """Tell whether a batched call is expected to be faster on CUDA.

    Args:
        operator: "eigh", "qr", "cholesky_ex", "solve_triangular"; others never gain.
        rows: how many each matrix has.
        version: that of torch, such as "2.11.0+cu128".

    Raises:
        ValueError: `version` is not a version of torch.
    """
    parts = version.split("+")[0].split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise ValueError(f"{version!r} is not a version of torch, such as 2.11.0+cu128")
    minor = int(parts[1]) if parts[0] == "2" else ANY
    return any(
        line.operator == operator and line.torch[0] <= minor <= line.torch[1] and rows <= line.largest for line in TABLE
    )
