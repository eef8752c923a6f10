"""The user's cache folder: what is made once on a machine and kept for later runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(what: str) -> Path:
    """`$XDG_CACHE_HOME/drumroll/<what>`, or `~/.cache/drumroll/<what>`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drumroll" / what
