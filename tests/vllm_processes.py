"""Which processes of vLLM there are on this machine."""

from pathlib import Path


def vllm_processes(part: str = "VLLM::") -> list[int]:
    """Ids of those whose name has that part."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if part in name:
            found.append(int(folder.name))
    return found
