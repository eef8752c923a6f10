"""From a config's `model` section to a Hugging Face folder that trainers, engines and tokenizers load.

Nothing here loads weights. A folder or hub id is checked by looking at its files; a GGUF file is converted, once on this machine; a model
from scratch is made here, once, so that every worker reads the same one.
"""

from __future__ import annotations

from pathlib import Path

from drumroll.config.models import ModelConfig
from drumroll.errors import ModelError
from drumroll.hub import nearest_sibling, refuse_revision, resolve_folder
from drumroll.models.converted import converted_folder
from drumroll.models.folder import check_folder
from drumroll.models.packaged import SCHEME, packaged_file
from drumroll.models.scratch import check_scratch, make_scratch


def prepare_model(cfg: ModelConfig, target: Path, seed: int) -> Path:
    """The folder of the model: the one the config names, or `target`, into which a model from scratch is written, once.

    The weights of a model from scratch depend on the config and on `seed` alone."""
    if cfg.scratch is not None:
        if not (target / "config.json").exists():
            make_scratch(cfg.scratch, target, seed)
        return target
    return _existing(cfg)


def check_model(cfg: ModelConfig) -> None:
    """Raise what `prepare_model` would raise, without writing anything outside the caches of downloads and conversions."""
    if cfg.scratch is not None:
        check_scratch(cfg.scratch)
    else:
        _existing(cfg)


def resolve_model(path: str, revision: str | None = None) -> Path:
    """The folder behind `model.path`: a folder, a hub id, a GGUF file, or `package:` with the name of a model in an installed package.

    Example: `resolve_model("package:smollm2-135m-instruct")`."""
    file = Path(path).expanduser()
    if path.startswith(SCHEME):
        file = packaged_file(path.removeprefix(SCHEME))
    elif file.suffix.lower() != ".gguf" or file.is_dir():
        return resolve_folder(path, revision, "model", ModelError)
    elif not file.exists():
        raise ModelError(f"'{path}' does not exist.{nearest_sibling(file)} Relative paths start at the working directory.")
    refuse_revision(path, revision, ModelError)
    return converted_folder(file)


def _existing(cfg: ModelConfig) -> Path:
    assert cfg.path is not None, "ModelConfig has either `path` or `scratch`"
    folder = resolve_model(cfg.path, cfg.revision)
    check_folder(folder, trust_remote_code=cfg.trust_remote_code)
    return folder


def resolve_dtype(dtype: str, device: str) -> str:
    """`auto` is bfloat16 on GPUs and float32 on CPUs."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.startswith("cuda") else "float32"
