"""Which accelerators are known, how is one recognized, and which compiler options and target machines has it?

A TPU is recognized by jax's name for it. A GPU is recognized by what it is (`detection`): compute capability, memory
and multiprocessors, with its name only where two cards share those. A GPU that the table does not list is described by
its attributes. To add a card, add a row to `gpus.GPUS`; to add a TPU, an entry to `tpus.TPUS`.
"""

from .chip import GIB, Chip
from .compiler_options import compiler_options
from .detection import chip_of
from .gpus import GPUS, GPUAttributes, gpu_of
from .targets import CHIPS, NoCompilerError, Target, target
from .tpus import TPUS

__all__ = [
    "CHIPS",
    "GIB",
    "GPUS",
    "TPUS",
    "Chip",
    "GPUAttributes",
    "NoCompilerError",
    "Target",
    "chip_of",
    "compiler_options",
    "gpu_of",
    "target",
]
