"""Engines of other packages say which versions they work with, and how to get one."""

from __future__ import annotations

import importlib.metadata

import pytest
from installed import CHECKS

from drumroll.config.models import EngineConfig
from drumroll.errors import PluginError
from drumroll.registry import REGISTRY


@pytest.mark.parametrize("kind", CHECKS)
def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def nothing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    with pytest.raises(PluginError, match=rf"pip install 'drumroll\[{kind}\]'"):
        REGISTRY.lookup("infer_backend", kind).schema(EngineConfig)()


@pytest.mark.parametrize(
    ("kind", "version"),
    [("vllm", "0.26.0"), ("vllm", "0.32.0+cpu"), ("sglang", "0.5.21"), ("sglang", "0.5.22.post1"), ("sglang", "0.5.23")],
)
def test_supported_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, kind: str, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    CHECKS[kind]()


@pytest.mark.parametrize(
    ("kind", "version", "supported"),
    [
        *(("vllm", version, r"at least 0\.26 and below 0\.33") for version in ("0.25.1", "0.33.0rc1", "1.0")),
        *(("sglang", version, r"at least 0\.5\.21 and below 0\.5\.24") for version in ("0.5.20", "0.5.24", "0.6", "1.0.0rc1")),
    ],
)
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str, version: str, supported: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with pytest.raises(PluginError, match=f"expected {supported}"):
        CHECKS[kind]()
