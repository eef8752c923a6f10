"""What another process needs of this one before it can understand its arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import cloudpickle

from drumroll.errors import PluginError
from drumroll.registry import REGISTRY, Entry, import_plugin


@dataclass(frozen=True, slots=True)
class Luggage:
    """Import paths and the user's plugins."""

    sys_path: tuple[str, ...]
    files: Mapping[str, str]
    """Plugin files by path → source."""
    modules: tuple[str, ...]
    """Installed modules that registered something."""
    objects: bytes
    """Functions and entries that exist only as objects of the controller's process, by cloudpickle."""

    @classmethod
    def pack(cls) -> Luggage:
        """Everything that this process's registry holds beyond the built-in entries."""
        modules: set[str] = set()
        entries: list[Entry] = []
        for entry in REGISTRY.entries.values():
            module = str(entry.target.__module__)
            if module == "__main__":
                entries.append(entry)
            elif not module.startswith(("drumroll.", "drumroll_plugin_")):
                modules.add(module)
        return cls(
            sys_path=tuple(os.path.abspath(path) for path in sys.path),
            files=dict(REGISTRY.files),
            modules=tuple(sorted(modules)),
            objects=cloudpickle.dumps((dict(REGISTRY.shipped), entries)),
        )

    def unpack(self) -> None:
        """Make this process's registry equal to the one that was packed."""
        sys.path.extend(path for path in self.sys_path if path not in sys.path)
        REGISTRY.files.update(self.files)
        for path in self.files:
            REGISTRY.load_file(path)
        for module in self.modules:
            import_plugin(module)
        try:
            shipped, entries = cloudpickle.loads(self.objects)
        except Exception as error:
            raise PluginError(
                f"a function of the process that started the run cannot be rebuilt in a worker: {type(error).__name__}: {error}. "
                f"Name it by import path or file instead."
            ) from error
        REGISTRY.shipped.update(shipped)
        for entry in entries:
            REGISTRY.entries[entry.family, entry.name] = entry
