"""The arrows of ARCHITECTURE.md: a module imports only from lower layers, or from its own folder; ray only in cluster/."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "drumroll"

LAYERS = {
    "life": 0, "types": 0, "imports": 0, "cache": 0, "errors": 0, "registry": 0,
    "config": 1, "hub": 1, "luggage": 1, "child": 1, "sandbox": 1, "text": 1,
    "algo": 2, "rewards": 2, "plan": 2, "data": 2, "models": 2,
    "backends": 3, "envs": 3,
    "cluster": 4,
    "rollout": 5, "record": 5, "agents": 5,
    "workers": 6,
    "pipelines": 7,
    "api": 8, "bench": 8,
    "cli": 9, "__init__": 10, "__main__": 10,
}  # fmt: skip

MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "drumroll" else {str(node.module)}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = room(path)
    assert own in LAYERS, f"{own}: give it a layer in this test and in ARCHITECTURE.md"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "ray":
            assert own == "cluster", f"{path.name} imports ray; only cluster/ may"
        if parts[0] == "drumroll" and len(parts) > 1 and parts[1] in LAYERS and parts[1] != own:
            assert LAYERS[parts[1]] < LAYERS[own] or LAYERS[own] == 0, (
                f"{own} (layer {LAYERS[own]}) imports {name} (layer {LAYERS[parts[1]]})"
            )


def test_the_cluster_hosts_workers_without_importing_them() -> None:
    for path in (PACKAGE / "cluster").rglob("*.py"):
        assert not any(name.startswith(("drumroll.workers", "drumroll.envs", "drumroll.rewards")) for name in imported(path))
