"""Analyzes compiled programs from their text, the optimized HLO of a GPU or TPU."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator

_KERNEL_TARGETS = ("meshserve_", "tpu_custom_call")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<type>.+?) (?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)")
_SHAPE = re.compile(r"(?P<dtype>[a-z]+[0-9]+)\w*\[(?P<dims>[0-9,]*)\]")
_WEIGHTS = ("weights", "params")  # prefixes of the names of these arguments
_MIN_WEIGHT_BYTES = 1 << 20  # minimum size of a layer's matrix; norms are smaller
# Operations that launch nothing on the device.
_NAMES_ONLY = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "call"}
_MOVING = {"copy", "copy-start", "slice", "dynamic-slice", "transpose", "convert", "reshape", "concatenate", "fusion"}
_COMPUTING = {"dot", "custom-call", "reduce", "convolution"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramText:
    """Counts of operations in the program of one device."""

    num_kernels: int  # calls of our own kernels
    num_all_reduces: int  # in any form that the compilers use
    num_launches: int  # kernels, library calls and copies; a loop counts as one
    num_recomputed: int  # instructions that are computed twice to save memory
    weight_copies: tuple[str, ...]  # operations that only copy weights
    weight_copy_bytes: int


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    called: tuple[str, ...]

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], int]]:
        """The dimensions and the bytes per element of each part of the result."""
        found = []
        for match in _SHAPE.finditer(self.type):
            bits = int(re.sub(r"\D", "", match["dtype"]))
            found.append((tuple(int(extent) for extent in match["dims"].split(",") if extent), max(1, bits // 8)))
        return found

    @property
    def num_elements(self) -> int:
        return max((math.prod(extents) for extents, _ in self.shapes), default=0)


def read(text: str) -> ProgramText:
    """Analyzes the text of a compiled program."""
    entry, computations = _computations(text)
    main = computations.get(entry, [])
    moved = list(_weight_copies(main, computations))
    return ProgramText(
        num_kernels=sum(text.count(f'custom_call_target="{target}') for target in _KERNEL_TARGETS),
        num_all_reduces=len(re.findall(r"= \S+ all-reduce(?:-start)?\(", text)),
        num_launches=sum(
            item.opcode not in _NAMES_ONLY and not item.opcode.endswith(("-done", "-update")) for item in main
        ),
        num_recomputed=sum(
            ".remat" in item.name and item.opcode not in _NAMES_ONLY and bool(item.operands)  # zeros cost nothing
            for computation in computations.values()
            for item in computation
        ),
        weight_copies=tuple(f"{item.type} {item.name}" for item in moved),
        weight_copy_bytes=sum(math.prod(extents) * size for item in moved for extents, size in item.shapes),
    )


def num_slices(text: str, num_elements: Collection[int]) -> int:
    """Returns how many operations, inside and outside of loops, only copy a slice with one of these element counts."""
    _, computations = _computations(text)
    return sum(
        item.opcode == "fusion" and "dynamic-slice_fusion" in item.name and item.num_elements in num_elements
        for computation in computations.values()
        for item in computation
    )


def _computations(text: str) -> tuple[str, dict[str, list[_Instruction]]]:
    """Returns the name of the entry computation, and the instructions of each computation."""
    entry, current = "", list[_Instruction]()
    found: dict[str, list[_Instruction]] = {}
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)
        if head is not None and not line.startswith(" "):
            current = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
            continue
        match = _INSTRUCTION.match(line)
        if match is not None:
            operands, _, attributes = match["rest"].partition(")")
            current.append(
                _Instruction(
                    match["name"],
                    match["type"],
                    match["opcode"],
                    tuple(re.findall(r"%([\w.-]+)", operands)),
                    tuple(re.findall(r"(?:calls|to_apply|body)=%([\w.-]+)", attributes)),
                )
            )
    return entry, found


def _weight_copies(main: list[_Instruction], computations: dict[str, list[_Instruction]]) -> Iterator[_Instruction]:
    """Yields instructions that read a weight, compute nothing, and write at least half a layer of it."""
    layer_elements: dict[str, int] = {}  # elements per layer of each weight, by each of its names
    for item in main:
        read_elements = [layer_elements[name] for name in item.operands if name in layer_elements]
        if item.opcode == "parameter" and item.name.startswith(_WEIGHTS):
            ((extents, size),) = item.shapes
            elements = math.prod(extents[1:] if len(extents) > 2 else extents)  # stacked over layers, or a table
            if len(extents) > 1 and elements * size >= _MIN_WEIGHT_BYTES:
                layer_elements[item.name] = elements
        elif item.opcode == "bitcast" and read_elements:
            layer_elements[item.name] = read_elements[0]
        elif item.opcode in _MOVING and read_elements and not _computes(item, computations):
            if any(2 * item.num_elements >= elements for elements in read_elements):
                yield item


def _computes(item: _Instruction, computations: dict[str, list[_Instruction]]) -> bool:
    """Returns whether an instruction, or a computation that it calls, multiplies or reduces."""
    inner = [part for name in item.called for part in computations.get(name, [])]
    return item.opcode in _COMPUTING or any(_computes(part, computations) for part in inner)
