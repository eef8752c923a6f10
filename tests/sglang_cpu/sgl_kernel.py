"""Stands in for SGLang's own kernels where `make test-sglang` runs it on a CPU: they are not published for CPUs.

SGLang imports some of their names, and on a processor without AMX calls none of them: it computes with torch.
"""

from __future__ import annotations

from typing import Any, NoReturn


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
