"""torch.ops.apexfx.*: one op family a file, each with schema, reference, fake and autograd.

The pure-torch references are complete by themselves; compiled kernels only add a faster implementation
for the same names, and win by dispatch priority.
"""

from __future__ import annotations
