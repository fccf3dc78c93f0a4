"""A Triton backend for machines without a GPU that only serves the interpreter (``TRITON_INTERPRET=1``).

vLLM's V2 model runner asks Triton for an active driver before it launches a kernel. With this folder on
``PYTHONPATH`` Triton finds one (entry point ``triton.backends``), and the kernels run in Python on the CPU.
"""

from __future__ import annotations

from typing import Any


def accept_integer_masks() -> None:
    """A plugin of vLLM: let kernels run whose masks are integers, which the interpreter refuses.

    Combined from a scalar and a block, a mask is an integer in the interpreter and a bool in compiled code.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    if getattr(InterpreterBuilder, "accepts_integer_masks", False):
        return
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask: Any) -> Any:
        mask.data = mask.data.astype(np.bool_, copy=False)
        return mask

    InterpreterBuilder.create_masked_load = lambda self, ptrs, mask, *rest: load(
        self, ptrs, as_bool(mask), *rest
    )
    InterpreterBuilder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(
        self, ptrs, value, as_bool(mask), *rest
    )
    InterpreterBuilder.accepts_integer_masks = True
