"""What these tests share with the end-to-end tests: the tiny run, and a stand-in for Ray."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]
