"""A Triton backend for machines without a GPU that only serves the interpreter (``TRITON_INTERPRET=1``).

vLLM's V2 model runner asks Triton for an active driver before it launches a kernel. With this folder on
``PYTHONPATH`` Triton finds one (entry point ``triton.backends``), and the kernels run in Python on the CPU.
"""
