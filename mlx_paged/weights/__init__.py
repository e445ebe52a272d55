"""Checkpoints on disk: their configuration, their precision, the demo model.

Importing this package alone imports nothing else, so that the command line can ask it.
"""

DTYPES = ("auto", "stored", "float32", "float16", "bfloat16")
"""What `load` takes as a dtype; its docstring says what each means."""
