"""What users get: the wheel, what it asks for, and imports that no folder of ours breaks."""

import ast
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.utils.import_utils import KERNELS_MIN_VERSION

ROOT = Path(__file__).parents[1]
SOURCES = ("ragcache", "kernels")

FAKE_KERNELS = """
class Anything:
    def __init__(self, *args, **kwargs): pass
    def __call__(self, *args, **kwargs): return lambda decorated: decorated

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything() if name[0].islower() else Anything
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built offline from a copy, so that no build folder is left in the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        junk = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tree / name, ignore=junk)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--quiet"]
    out = tree / "out"
    subprocess.run([*command, "--no-build-isolation", "-w", out, tree], check=True)
    (path,) = out.glob("ragcache_gateway-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def requirements(metadata, extra=""):
    """Name and range of each distribution that the base install, or an extra, asks for."""
    found = map(Requirement, metadata.get_all("Requires-Dist"))
    chosen = (each for each in found if (each.marker is None) == (not extra))
    return {
        canonicalize_name(each.name): each.specifier
        for each in chosen
        if each.marker is None or each.marker.evaluate({"extra": extra})
    }


def test_the_wheel_holds_every_module_and_nothing_else_of_the_tree(wheel):
    built = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT).relative_to(base))
        for base, folder in (("", "ragcache"), ("kernels", "kernels/ragcache_kernels"))
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".c", ".h", ".html", ".js", ".css"} or path.name == "py.typed"
    }
    ours = {name for name in built if name.startswith(("ragcache/", "ragcache_kernels/"))}
    assert ours == sources
    assert {name.split("/")[0] for name in built} == {"ragcache", "ragcache_kernels"}


def test_the_wheel_is_typed_and_licensed(wheel):
    names = wheel.namelist()
    assert {"ragcache/py.typed", "ragcache_kernels/py.typed"} <= set(names)
    (licence,) = (name for name in names if name.endswith("/licenses/LICENSE"))
    text = wheel.read(licence).decode()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_metadata_says_what_it_is(metadata):
    assert metadata["Name"] == "ragcache-gateway"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {"dev", "gpu", "redis"}
    assert set(requirements(metadata, "gpu")) == {"triton"}


def test_the_command_is_installed(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "ragcache = ragcache.cli:main" in wheel.read(name).decode()


def test_the_base_install_has_all_that_the_package_imports(metadata):
    declared = {name for extra in ("", "gpu", "redis") for name in requirements(metadata, extra)}
    declared.add("pydantic-core")  # pydantic's own, at its exact version
    owners = packages_distributions()
    imported = {name for folder in SOURCES for name in third_party(ROOT / folder)}
    imported.remove("langchain_ragcache")  # what `bench langchain` measures, and asks for by name
    missing = {
        name
        for name in imported
        if declared.isdisjoint(map(canonicalize_name, owners.get(name, [name])))
    }
    assert "aiohttp" in imported
    assert not missing


def test_every_requirement_is_pinned_within_its_range(metadata):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = requirements(metadata) | requirements(metadata, "dev")
    assert {name for name in wanted if not wanted[name].contains(pins.get(name, "0"))} == set()


def third_party(folder):
    """Top-level names that the files below a folder import and that are not ours."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            tops = {name.partition(".")[0] for name in names}
            yield from tops - sys.stdlib_module_names - {"ragcache", "ragcache_kernels"}


def import_transformers(cwd, site):
    """Import transformers in `cwd`, which comes first on the path; `site` comes behind it."""
    code = f"import sys; sys.path.append({str(site)!r}); import transformers.modeling_utils"
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


def test_the_kernels_folder_does_not_shadow_the_package_of_that_name(tmp_path):
    """transformers imports names from the hub's `kernels` package wherever that is installed."""
    site, shadowed = tmp_path / "site", tmp_path / "shadowed"
    info = site / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    for folder in (site / "kernels", info, shadowed / "kernels"):
        folder.mkdir(parents=True)
    (site / "kernels/__init__.py").write_text(FAKE_KERNELS)
    (info / "METADATA").write_text(f"Name: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    (shadowed / "kernels/__init__.py").touch()

    from_root = import_transformers(ROOT, site)
    assert from_root.returncode == 0, from_root.stderr
    assert "from 'kernels'" in import_transformers(shadowed, site).stderr
