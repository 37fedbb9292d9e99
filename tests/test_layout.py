"""The folders' import direction, read from the source; the table is the architecture."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    "ragcache": ROOT / "ragcache",
    "ragcache_kernels": ROOT / "kernels/ragcache_kernels",
    "langchain_ragcache": ROOT / "integrations/langchain_ragcache",
}

PACKAGES = {"ragcache_kernels": "kernels", "langchain_ragcache": "integrations"}
SHARED = {"types", "errors", "config", "metrics"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "config": {"errors", "types"},
    "metrics": {"errors", "types"},
    "logs": set(),
    "kernels": set(),
    "prefix": SHARED,
    "prompt": SHARED,
    "engine": SHARED | {"prefix", "kernels"},
    "serving": SHARED | {"prompt", "engine", "prefix"},
    "loading": SHARED | {"serving", "prompt", "engine", "prefix", "kernels"},
    "worker": SHARED | {"loading", "engine", "logs"},
    "cluster": SHARED | {"prefix"},
    "gateway": SHARED | {"serving", "cluster"},
    "routing": SHARED | {"gateway", "prompt", "engine"},
    "embedded": SHARED | {"gateway", "loading", "serving"},
    "integrations": set(),
    "doctor": SHARED | {"gateway", "cluster", "prompt", "engine", "kernels"},
    "bench": SHARED
    | {"gateway", "cluster", "loading", "serving", "prompt", "engine", "prefix", "kernels"}
    | {"embedded", "integrations"},
    "cli": SHARED
    | {"logs", "gateway", "cluster", "loading", "routing", "serving"}
    | {"doctor", "bench"},
    "__main__": {"cli"},
}
# Where the chat model meets the engine in its own process; all else of it knows only the wire.
EMBEDDED = {
    ("langchain_ragcache.embedded", "embedded"),
    ("langchain_ragcache.embedded", "errors"),
}
STANDARD_LIBRARY_ONLY = {"types", "errors", "prefix"}
MAY_IMPORT_TORCH = {"engine", "kernels", "doctor", "bench"}
WITHOUT = {"config": {"torch", "transformers", "aiohttp"}, "metrics": {"torch", "aiohttp"}}
MAX_LINES = 350


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found = {}
    for package, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """What a module imports anywhere in its text; names of ours down to the module."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in modules() else node.module for name in names)
    return frozenset(found)


def folder(module: str) -> str | None:
    """The row of the table that a module belongs to; None for what is not ours."""
    package, _, rest = module.partition(".")
    if package in PACKAGES:
        return PACKAGES[package]
    return rest.partition(".")[0] if package == "ragcache" and rest else None


def pairs() -> list[tuple[str, str]]:
    return [(module, target) for module in modules() for target in imports(module)]


def test_the_walk_sees_the_whole_package():
    assert {"ragcache.types", "ragcache.prefix.cache", "ragcache_kernels"} <= modules().keys()
    assert "ragcache.prefix.blocks" in imports("ragcache.prefix.cache")


def test_folders_import_only_what_the_table_allows():
    wrong = [
        f"{module} imports {target}"
        for module, target in pairs()
        if (own := folder(module)) and (other := folder(target))
        if own != other and other not in MAY_IMPORT.get(own, set())
        if (module, other) not in EMBEDDED
    ]
    assert not wrong


def test_nothing_imports_in_a_circle():
    graph = {
        module: {target for target in imports(module) if target in modules()}
        for module in modules()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the circle


def test_the_index_and_the_shared_words_need_only_the_standard_library():
    wrong = [
        f"{module} imports {target}"
        for module, target in pairs()
        if folder(module) in STANDARD_LIBRARY_ONLY
        if not folder(target) and target.partition(".")[0] not in sys.stdlib_module_names
    ]
    assert not wrong


def test_torch_stays_in_the_engine_and_the_kernels():
    wrong = [
        module
        for module, target in pairs()
        if target.partition(".")[0] == "torch" and folder(module) not in MAY_IMPORT_TORCH
    ]
    assert not wrong


@pytest.mark.parametrize("module", WITHOUT)
def test_settings_and_metrics_stay_light(module):
    parts = [name for name in modules() if folder(name) == module]
    packages = {target.partition(".")[0] for name in parts for target in imports(name)}
    assert packages
    assert packages.isdisjoint(WITHOUT[module])


def test_files_stay_short():
    files = [*modules().values(), *(ROOT / "examples").glob("*.py")]
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
