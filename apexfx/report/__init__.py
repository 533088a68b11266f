"""What every pass did, printable at any time: `data` holds it, `text` and `html` show it, the rest are parts of both."""

from .data import Report as Report
