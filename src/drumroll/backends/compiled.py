"""Functions in C for the CPU, compiled by the machine's own compiler when they are first needed, and kept for later processes.

    decode.c ── cc, for this very processor ──▶ ~/.cache/drumroll/compiled/decode-<hash>.so ──▶ loaded

They are there to be faster: whoever uses them can also do without, where there is no compiler. The hash covers source, compiler, flags and
processor, so that nothing stale or foreign is loaded from a home folder that several machines share.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from drumroll.cache import cache_folder

FLAGS = ("-O3", "-march=native", "-std=c11", "-fopenmp-simd", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
COMPILE_S = 60.0

logger = logging.getLogger(__name__)


@cache
def load(source: Path) -> ctypes.CDLL | None:
    """The functions of a C file; None where they cannot be compiled here, which is logged once."""
    compiler = find_compiler()
    if compiler is None:
        logger.info("%s is not used: there is no C compiler here (`cc`, or what the variable CC names)", source.name)
        return None
    try:
        library = _library(source, compiler)
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # damaged
            library.unlink()
            return ctypes.CDLL(str(_library(source, compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: nobody's home folder
        said = getattr(error, "stderr", None) or error
        logger.warning("%s is not used: '%s' did not compile it: %s", source.name, compiler, said)
        return None


def find_compiler() -> str | None:
    """Path of the compiler that the variable CC names, or else of `cc`."""
    return shutil.which(os.environ.get("CC") or "cc")


def _library(source: Path, compiler: str) -> Path:
    """The compiled file, which is made if it is not there yet; several processes may do so at once."""
    text = source.read_bytes()
    version = _output(compiler, "--version")
    key = hashlib.blake2b(b"\0".join((text, version.encode(), " ".join(FLAGS).encode(), _processor())), digest_size=12).hexdigest()
    folder = cache_folder("compiled")
    library = folder / f"{source.stem}-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside) / library.name
            _output(compiler, *FLAGS, str(source), "-o", str(made), "-lm")
            made.replace(library)
    return library


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S).stdout


def _processor() -> bytes:
    """What tells processors apart whose instructions differ."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n", 1)[0].splitlines()
    except OSError:
        return platform.machine().encode() + platform.processor().encode()
    return platform.machine().encode() + b"\n".join(line for line in lines if line.startswith((b"flags", b"model name", b"Features")))
