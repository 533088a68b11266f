"""What every pass did to a model, as data, text and HTML.

Read in this order: `records` (the data), `data` (`Report`, the class that users hold), `text` and `html` (its two forms),
`cast_ledger`, `diff` and `fold_repeats` (parts of both).
"""

from .data import Report as Report
