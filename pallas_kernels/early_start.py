"""Lets the next kernel on the stream start while this one still runs.

From Hopper on XLA launches kernels with programmatic dependent launch: the programs of the next
kernel may take their places early and wait at their beginning, by an instruction that XLA puts
there, until this kernel has ended and what it wrote is visible. They may as soon as all programs
of this kernel have said so or ended, which is what `start_next_kernel` says. What it saves is the
time of a launch, a microsecond, in steps that launch hundreds of kernels one after the other.
PTX ISA, `griddepcontrol`.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_kernels.tiles import current_device


def can_start_early(interpret: bool) -> bool:
    """Whether kernels can say so on the device that is traced for; the interpreter cannot."""
    return not interpret and "A100" not in current_device()


def start_next_kernel(index, is_early: bool):
    """`index`, an int32 array of a kernel, unchanged; the kernel must use it early."""
    if not is_early:
        return index
    # As a value that is used, because Triton drops operations without a use.
    [zero] = plt.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[jnp.zeros((1,) * index.ndim, jnp.int32)],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,) * index.ndim, jnp.int32)],
    )
    return index + zero
