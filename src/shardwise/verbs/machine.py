"""What is known of the machine that this process runs on."""

from __future__ import annotations

import os


def memory_bytes() -> int | None:
    """Of the whole machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
