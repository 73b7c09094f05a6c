"""Optimised HLO as data. In: a compiler's text (`compiled.as_text()`). Out: a `Program`.

`program` reads the text and counts its operations, `instructions` has the parts it consists of
(instructions, shapes, attributes, source lines), `dataflow` follows values back to where they come
from and counts how often each computation runs. `kernel_work` has the work of custom kernels, which
`kernel_counting` counts in their own programs with the constants that `literals` reads.
"""
