"""GGUF files, unpacked once into a folder that loads in a second instead of a minute."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

import transformers

from ragcache.errors import ConfigError

log = logging.getLogger(__name__)


def unpack(file: Path) -> Path:
    """The folder with the weights of a GGUF file in float32, its configuration and tokenizer.

    Raises:
        ConfigError: when the file cannot be read or the folder not be written.
    """
    folder = unpacked(file)
    if not folder.is_dir():
        log.info("unpacking %s into %s, once", file.name, folder)
        try:
            _unpack_into(file, folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: cannot unpack {file}: {error}") from error
    return folder


def unpacked(file: Path) -> Path:
    """Where that folder is, or will be: in the user's cache directory (`XDG_CACHE_HOME`).

    It takes four bytes a parameter; a changed file or another version of transformers gets a folder
    of its own.
    """
    return _cache_home() / "ragcache" / f"{file.stem}-{_key(file)}"


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _key(file: Path) -> str:
    stat = file.stat()
    changed = int(stat.st_mtime)  # the layers of a container image keep no fractions of a second
    identity = f"{file.resolve()} {stat.st_size} {changed} {transformers.__version__}"
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def _unpack_into(file: Path, folder: Path) -> None:
    import torch  # whoever finds the folder there already need not have it
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
        quantization = GgufConfig(dequantize=True)
        AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=quantization, dtype=torch.float32
        ).save_pretrained(partial)
        partial.chmod(0o755)
        partial.replace(folder)  # whole or not at all
    except OSError:
        if not folder.is_dir():  # else another process was faster, which is as good
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
