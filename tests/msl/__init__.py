"""Runs the Metal source that MLX would compile on this machine's processor, and checks it.

    from msl import metal_kernel, Executor, KernelFault

`metal_kernel` takes and returns what mx.fast.metal_kernel does; see README.md in this folder.
"""

from .compiler import NO_COMPILER, find_compiler
from .executor import Executor, Kernel, metal_kernel
from .fault import KernelFault, Place
from .report import Report, Traffic

__all__ = [
    "NO_COMPILER",
    "Executor",
    "Kernel",
    "KernelFault",
    "Place",
    "Report",
    "Traffic",
    "find_compiler",
    "metal_kernel",
]
