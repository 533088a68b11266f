"""What every pass did, printable at any time.

Read in this order: `records` (what passes leave behind), `data` (`Report`, which users hold), `text` and `html` (how it shows),
`cast_ledger`, `diff` and `fold_repeats` (parts of both).
"""

from .data import Report as Report
