"""How leaves of state are stored between steps: in fewer bits, in host memory, or both.

A step works on leaves in their own dtype. A micro-group opens its leaves before it runs, or where its kernels read
them, and rounds those that it wrote to their storage again. So a run has the bits of the plain optimizer whose state
is rounded by `rounded` after each step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from canzona_compile.errors import CanzonaError, StateNotPinned, some
from canzona_compile.ir.layout import Shape
from canzona_compile.kernels import int8_blocks

BLOCK = 128  # elements of a row that share a scale
LARGEST = 127  # of the codes
CODE_DIGITS = 7  # binary digits of a code
StateOption: TypeAlias = "str | Mapping[str, str] | None"
WHERE = "the option state"
DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Storage:
    """Where and in which dtype a leaf is stored.

    Attributes:
        dtype: "int8", "bfloat16", or empty for its own.
        host: whether it is in host memory.
        whole: whether only the owner can store it, because a fragment has parts of blocks.
    """

    dtype: str = ""
    host: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, (self.dtype, "cpu" if self.host else "")))

    def fitting(self, dtype: torch.dtype) -> Storage | None:
        """The storage of a leaf of this dtype, which "bfloat16" must not widen; None if nothing is left of it."""
        if self.dtype != "bfloat16" or dtype.itemsize > 2:
            return self
        return replace(self, dtype="") if self.host else None

    def shapes(self, shape: Shape, dtype: torch.dtype) -> list[tuple[Shape, torch.dtype]]:
        """Shapes and dtypes of the tensors that store a leaf of `shape` and `dtype`."""
        if self.dtype != "int8":
            return [(shape, DTYPES.get(self.dtype, dtype))]
        return [(shape, torch.int8), ((*shape[:-1], -(-shape[-1] // BLOCK)), torch.float32)]

    def nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """Bytes that a leaf of `shape` and `dtype` takes."""
        return sum(math.prod(own) * kind.itemsize for own, kind in self.shapes(shape, dtype))


@dataclass(frozen=True, slots=True)
class StateRules:
    """What users gave as `state=`: storages by patterns of the names of leaves. The first pattern that fits counts.

    Attributes:
        lenient: whether users gave one text for all leaves. Then "int8" is for running means of gradients of matrices,
            and everything else has 16 bits.
    """

    rules: tuple[tuple[str, Storage], ...]
    lenient: bool = False

    def __str__(self) -> str:
        if self.lenient:
            return str(self.rules[0][1])
        return ", ".join(f"{pattern}: {storage}" for pattern, storage in self.rules)

    def of(self, leaf: str, dtype: torch.dtype) -> Storage | None:
        """The storage of a leaf, by its name; None if it stays as it is, as leaves of 16 bits do under "bfloat16"."""
        found = next((storage for pattern, storage in self.rules if fnmatchcase(leaf, pattern)), None)
        return None if found is None else found.fitting(dtype)

    def of_eager(self, leaf: str, dtype: torch.dtype) -> Storage | None:
        """The storage of a leaf of an eager step, of which no graph shows what it does."""
        found = self.of(leaf, dtype)
        if found is None or found.dtype != "int8":
            return found
        return self.without_codes(
            found, leaf, dtype, "its step runs eagerly, so nothing shows whether it divides by it"
        )

    def without_codes(self, found: Storage, leaf: str, dtype: torch.dtype, why: str) -> Storage | None:
        """The storage of a leaf that cannot be int8, which is an error if users asked for that by its name."""
        if not self.lenient:
            raise no_codes(leaf, why)
        return replace(found, dtype="bfloat16").fitting(dtype)

    def check_fit(self, leaves: Iterable[str]) -> None:
        """Raise if a pattern fits none of the leaves of the state. "*" is for all leaves, also where there are none."""
        names = sorted(set(leaves))
        for pattern, _ in self.rules:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                raise CanzonaError(
                    f"{pattern!r} fits no leaf of the state",
                    at=WHERE,
                    hint=f"there are {some(names)}" if names else "the optimizer has no state that could be stored",
                )


def no_codes(leaf: str, why: str, at: str = WHERE) -> CanzonaError:
    """The error for a leaf that cannot be int8."""
    return CanzonaError(f"state {leaf!r} cannot be stored as int8: {why}", at=at, hint='store it as "bfloat16"')


def rules_of(given: StateOption) -> StateRules | None:
    """Read what users gave as `state=`."""
    if given is None or given == {}:
        return None
    if isinstance(given, str):
        return StateRules((("*", storage_of(given)),), lenient=True)
    if not isinstance(given, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in given.items()):
        raise CanzonaError(
            f"state={given!r} is neither a text nor texts by patterns of names of leaves",
            at=WHERE,
            hint='pass one such as "int8", or {"momentum_buffer": "int8", "exp_avg*": "bfloat16 cpu"}',
        )
    return StateRules(tuple((pattern, storage_of(text)) for pattern, text in given.items()))


def parse_state(text: str) -> str | dict[str, str]:
    """Read what a command is given: one storage, or "momentum_buffer=int8,exp_avg*=bfloat16 cpu"."""
    if "=" not in text:
        return text
    parts = [part.partition("=") for part in text.split(",")]
    if bad := next((leaf for leaf, equals, _ in parts if not equals), None):
        raise CanzonaError(f"--state: {bad!r} is not leaf=how", at=WHERE, hint='such as "momentum_buffer=int8"')
    leaves = [leaf for leaf, _, _ in parts]
    if twice := next((leaf for leaf in leaves if leaves.count(leaf) > 1), None):
        raise CanzonaError(f"--state has {twice!r} twice", at=WHERE)
    return {leaf: how for leaf, _, how in parts}


def storage_of(text: str) -> Storage:
    """Read one storage, such as "int8 cpu"."""
    words = text.split()
    dtypes, hosts = [word for word in words if word in DTYPES], words.count("cpu")
    if not words or len(dtypes) > 1 or hosts > 1 or len(dtypes) + hosts != len(words):
        raise CanzonaError(f"state: {text!r} is none of 'int8', 'bfloat16', 'cpu', or a dtype and 'cpu'", at=WHERE)
    return Storage("".join(dtypes), bool(hosts))


def storable(shape: Sequence[int], dtype: torch.dtype | None) -> bool:
    """Can a leaf be stored in another way? Counters and other numbers stay as they are."""
    return dtype is not None and dtype.is_floating_point and len(shape) > 0


# -- arithmetic ------------------------------------------------------------------------------------


def encode(value: Tensor, into: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
    """Round a tensor [..., n] to codes and scales, on GPUs by one kernel.

    Each block of `BLOCK` elements of a row is scale * code, with codes from -127 to 127, rounded to nearest, ties to
    even. A scale is the largest magnitude / 127, rounded up to so few digits that scale * code needs no rounding: 17,
    or for floats of 16 bits a power of two. So what `decode` returns has the
    very codes and scales that it was decoded from. A block with an infinity or a NaN becomes NaN.

    Args:
        into: what to write and to return.

    Returns:
        int8 [..., n], and float32 [..., n / BLOCK] rounded up.
    """
    narrow = value.dtype.itemsize == 2
    least = 2.0**-24 if value.dtype == torch.float16 else torch.finfo(torch.float32).smallest_normal
    digits = 1 if narrow else 24 - CODE_DIGITS
    if int8_blocks.usable(value):
        shapes = Storage("int8").shapes(tuple(value.shape), value.dtype)
        into = into or [torch.empty(shape, dtype=dtype, device=value.device) for shape, dtype in shapes]
        int8_blocks.encode(value, into, BLOCK, least, low_bits(digits))
        return into
    blocks = in_blocks(value.float())
    largest = torch.maximum(blocks.amax(-1), -blocks.amin(-1))  # much faster than a norm, and it has NaN's too
    scales = with_digits(largest.nan_to_num(0.0, 0.0) / LARGEST, digits).clamp(min=least)
    codes = (blocks / scales.unsqueeze(-1)).round_().to(torch.int8)
    scales = torch.where((largest / scales).round() == 0, 0.0, scales)  # where all codes are 0
    scales = torch.where(largest.isfinite(), scales, math.nan)  # whatever the codes are
    found = codes.flatten(-2)[..., : value.shape[-1]].contiguous(), scales
    if into is None:
        return found
    for target, part in zip(into, found, strict=True):
        target.copy_(part, non_blocking=True)
    return into


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor [..., n] that codes and scales stand for."""
    if int8_blocks.usable(codes, scales):
        return int8_blocks.decode(codes, scales, dtype, BLOCK)
    blocks = in_blocks(codes.float()).mul_(scales.unsqueeze(-1))
    return blocks.flatten(-2)[..., : codes.shape[-1]].to(dtype)


def in_blocks(value: Tensor) -> Tensor:
    """View or copy [..., n] as [..., blocks, BLOCK], with zeros at the end."""
    missing = -value.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(value, (0, missing)) if missing else value.contiguous()
    return padded.unflatten(-1, (-1, BLOCK)) if padded.shape[-1] else padded.reshape(*padded.shape[:-1], 0, BLOCK)


def with_digits(values: Tensor, digits: int) -> Tensor:
    """Round positive float32 up to so many binary digits."""
    low = low_bits(digits)
    return ((values.view(torch.int32) + low) & ~low).view(torch.float32)


def low_bits(digits: int) -> int:
    """The bits of a float32 that are not among so many binary digits."""
    return (1 << (24 - digits)) - 1


def rounded(value: Tensor, storage: Storage) -> Tensor:
    """What is left of a leaf that was stored; its own dtype again."""
    if storage.dtype == "int8":
        codes, scales = encode(value)
        return decode(codes, scales, value.dtype)
    return value.to(DTYPES.get(storage.dtype, value.dtype)).to(value.dtype)


# -- memory ----------------------------------------------------------------------------------------


class Stored:
    """A leaf of state as it is stored. Its memory stays the same for its life, as recorded steps need it.

    Args:
        value: the leaf, which it keeps nothing of.

    Attributes:
        laid: whether it is the fragment of a DTensor that is laid out like its parameter.
        tensors: what it is stored in: one tensor, or codes and scales.
    """

    __slots__ = ("device", "dtype", "laid", "shape", "storage", "stride", "tensors")

    def __init__(self, storage: Storage, value: Tensor, laid: bool = False) -> None:
        self.storage, self.shape, self.dtype, self.device = storage, tuple(value.shape), value.dtype, value.device
        self.stride, self.laid = value.stride(), laid
        self.tensors = tuple(self._memory(*form) for form in storage.shapes(self.shape, self.dtype))
        self.close(value)

    def open(self) -> Tensor:
        """The leaf, in memory of its own on its device."""
        parts = [tensor.to(self.device, non_blocking=True) for tensor in self.tensors]
        if self.storage.dtype == "int8":
            found = decode(parts[0], parts[1], self.dtype)
            if found.stride() == self.stride:
                return found
            parts = [found]
        value = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return value.copy_(parts[0])

    def close(self, value: Tensor) -> None:
        """Store a new value of the leaf."""
        if self.storage.dtype == "int8" and not self.storage.host:
            encode(value, self.tensors)
            return
        parts = encode(value) if self.storage.dtype == "int8" else (value,)
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.copy_(part, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, wherever it is."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have: of host memory, once the device has written it."""
        if self.storage.host and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {name: getattr(self, name) for name in self.__slots__}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    if not TYPE_CHECKING:  # what this class lacks is still an error of types

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"state that `state=` stores in another way has no {name!r}: change it by state_dict() and "
                "load_state_dict()"
            )

    def __repr__(self) -> str:
        return f"Stored({list(self.shape)}, {self.dtype}, as {self.storage})"

    def _memory(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        if not self.storage.host:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if self.device.type == "cuda":
            try:
                return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                warnings.warn(
                    StateNotPinned(f"host memory for state cannot be pinned, so copies are slower: {error}"),
                    stacklevel=2,
                )
        return torch.empty(shape, dtype=dtype, device="cpu")


def opened(value: Tensor | Stored) -> Tensor:
    """A leaf, whether it is stored or not."""
    return value.open() if isinstance(value, Stored) else value


def fetch(stored: Sequence[Stored]) -> list[Tensor]:
    """Open the leaves of several tasks; a call of programs."""
    return [own.open() for own in stored]


def room(stored: Sequence[Stored]) -> list[Tensor]:
    """Memory for the new values of leaves that a kernel opens itself; a call of programs."""
    return [torch.empty(own.shape, dtype=own.dtype, device=own.device) for own in stored]


def part(stored: Sequence[Stored], number: int) -> list[Tensor]:
    """What leaves are stored in, one of their tensors each; a call of programs."""
    return [own.tensors[number] for own in stored]


def store(stored: Sequence[Stored], values: Sequence[Tensor]) -> None:
    """Store new values of leaves; a call of programs."""
    for own, value in zip(stored, values, strict=True):
        own.close(value)
