"""What users get: the wheel, what it asks for, and imports that no folder of ours breaks."""

import ast
import os
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
from packaging.version import Version
from setuptools.command.build_ext import build_ext
from transformers.utils.import_utils import KERNELS_MIN_VERSION

ROOT = Path(__file__).parents[1]
SOURCES = ("ragcache", "kernels")
CLIENT = ROOT / "integrations"
JUNK = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "build")

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
    """The gateway's wheel."""
    tree = tmp_path_factory.mktemp("gateway")
    copy_of_the_tree(tree)
    with build(tree) as archive:
        yield archive


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory):
    """The wheel of the chat model."""
    tree = tmp_path_factory.mktemp("client") / "tree"
    shutil.copytree(CLIENT, tree, ignore=JUNK)
    with build(tree) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    return read_metadata(wheel)


@pytest.fixture(scope="module")
def client_metadata(client_wheel):
    return read_metadata(client_wheel)


def copy_of_the_tree(tree):
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, ignore=JUNK)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)


def build(tree, **variables):
    """A wheel, built offline from a copy, so that no build folder is left in our tree."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--quiet"]
    command += ["--no-build-isolation", "-w", tree / "out", tree]
    subprocess.run(command, check=True, env=os.environ | variables)
    (path,) = (tree / "out").glob("*.whl")
    return zipfile.ZipFile(path)


def read_metadata(wheel):
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
        if path.suffix in {".py", ".json", ".c", ".h", ".html", ".js", ".css"}
        or path.name == "py.typed"
    }
    ours = {name for name in built if name.startswith(("ragcache/", "ragcache_kernels/"))}
    libraries = {name for name in ours if name.endswith(".so")}
    assert ours - libraries == sources
    assert bool(libraries) == bool(shutil.which("cc"))
    assert {name.split("/")[0] for name in built} == {"ragcache", "ragcache_kernels"}


def test_without_a_compiler_there_is_a_wheel_all_the_same(tmp_path):
    copy_of_the_tree(tmp_path)
    with build(tmp_path, CC="/nonexistent") as archive:
        names = archive.namelist()
    assert "ragcache_kernels/native/library.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_no_two_tiers_of_the_kernels_share_a_folder_for_their_objects(monkeypatch):
    from distutils.core import run_setup  # setuptools brings it

    monkeypatch.chdir(ROOT)
    build = run_setup("setup.py", stop_after="init").get_command_obj("build_ext")
    build.ensure_finalized()
    folders = {}

    def compile_into(command, extension):
        folders[extension.name] = command.build_temp

    monkeypatch.setattr(build_ext, "build_extension", compile_into)
    for extension in build.extensions:
        build.build_extension(extension)
    assert len(set(folders.values())) == len(folders) > 0


def test_the_chat_models_wheel_holds_its_modules_and_nothing_else(client_wheel):
    built = {name for name in client_wheel.namelist() if ".dist-info/" not in name}
    sources = {f"langchain_ragcache/{path.name}" for path in CLIENT.glob("*/*.py")}
    assert built == sources | {"langchain_ragcache/py.typed"}


@pytest.mark.parametrize(
    ("fixture", "packages"),
    [("wheel", {"ragcache", "ragcache_kernels"}), ("client_wheel", {"langchain_ragcache"})],
)
def test_the_wheels_are_typed_and_licensed(fixture, packages, request):
    wheel = request.getfixturevalue(fixture)
    names = wheel.namelist()
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    (licence,) = (name for name in names if name.endswith("/licenses/LICENSE"))
    text = wheel.read(licence).decode()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_metadata_says_what_it_is(metadata):
    assert metadata["Name"] == "ragcache-gateway"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {"dev", "gpu", "otel"}
    assert set(requirements(metadata, "gpu")) == {"triton"}


def test_the_command_is_installed(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "ragcache = ragcache.cli:main" in wheel.read(name).decode()


def test_the_chat_models_metadata_says_what_it_is(client_metadata):
    assert client_metadata["Name"] == "langchain-ragcache"
    assert client_metadata["License-Expression"] == "Apache-2.0"
    assert client_metadata["Requires-Python"] == ">=3.11"
    assert client_metadata["Description-Content-Type"] == "text/markdown"
    assert set(client_metadata.get_all("Provides-Extra")) == {"agents", "embedded"}
    assert set(requirements(client_metadata, "embedded")) == {"ragcache-gateway"}
    assert set(requirements(client_metadata, "agents")) == {"langchain"}


def test_the_base_install_has_all_that_the_package_imports(metadata):
    declared = {
        name for extra in ("", "gpu", "otel", "redis") for name in requirements(metadata, extra)
    }
    declared.add("pydantic-core")  # pydantic's own, at its exact version
    declared |= {"multidict", "yarl"}  # of aiohttp's interface
    imported = {name for folder in SOURCES for name in imported_names(ROOT / folder)}
    ours = {"ragcache", "ragcache_kernels"}
    # The chat model is what `bench langchain` measures, and asks for where it is missing.
    assert undeclared(imported, declared) == {*ours, "langchain_ragcache", "langchain_core"}


def test_the_chat_models_base_install_has_all_but_the_engine_and_agents(client_metadata):
    imported, declared = set(imported_names(CLIENT)), set(requirements(client_metadata))
    assert undeclared(imported, declared) == {"langchain_ragcache", "ragcache", "langchain"}


def test_every_requirement_is_pinned_within_its_range(metadata, client_metadata):
    pins = read_pins("constraints.txt")
    wanted = [requirements(metadata), requirements(metadata, "dev")]
    wanted += [requirements(client_metadata), requirements(client_metadata, "agents")]
    assert not [
        name
        for ranges in wanted
        for name in ranges
        if not ranges[name].contains(pins.get(name, "0"))
    ]


def test_the_lowest_releases_of_langchain_that_are_tested_are_the_lowest_allowed(client_metadata):
    allowed = requirements(client_metadata) | requirements(client_metadata, "agents")
    lowest = read_pins("integrations/lowest.txt")
    for name in ("langchain-core", "langchain"):
        (bound,) = (each.version for each in allowed[name] if each.operator == ">=")
        assert Version(bound) == Version(lowest[name])


def undeclared(imported, declared):
    """The imported names that belong to none of the declared distributions."""
    owners = packages_distributions()
    return {
        name
        for name in imported
        if declared.isdisjoint(map(canonicalize_name, owners.get(name, [name])))
    }


def read_pins(path):
    """The release of each distribution that a file of pins names."""
    lines = (ROOT / path).read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins.items()}


def imported_names(folder):
    """Top-level names, but for the standard library's, that the files below a folder import."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            yield from {name.partition(".")[0] for name in names} - sys.stdlib_module_names


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
