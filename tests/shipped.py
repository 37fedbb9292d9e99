"""What is shipped to run in containers, read from its files."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from dockerfile_parse import DockerfileParser

from ragcache.cli import Ragcache

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "docker-compose.yml"
GPU = ROOT / "docker/gpu.yml"
PROMETHEUS = ROOT / "docker/prometheus"
GRAFANA = ROOT / "docker/grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))


@cache
def read(path: Path) -> Any:
    """A YAML or JSON file."""
    return yaml.safe_load(path.read_text())


def interpolated(text: str, **variables: str) -> str:
    """What Compose makes of `${NAME:-default}`."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], text)


def services() -> dict[str, Any]:
    """The services by name, as Compose sees them where no variable is set."""
    return json.loads(interpolated(json.dumps(read(COMPOSE)["services"])))


@cache
def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments on one line."""
    content = BytesIO((ROOT / "docker/Dockerfile").read_bytes())
    steps = DockerfileParser(fileobj=content).structure
    pairs = [(each["instruction"], each["value"]) for each in steps]
    return [(name, value) for name, value in pairs if name != "COMMENT"]


def arguments(instruction: str) -> list[str]:
    """The arguments of every such instruction."""
    return [value for name, value in dockerfile() if name == instruction]


def variables() -> dict[str, str]:
    """The environment of the image's last stage."""
    start = max(i for i, (name, _) in enumerate(dockerfile()) if name == "FROM")
    found = (value for name, value in dockerfile()[start:] if name == "ENV")
    return dict(each.split("=", 1) for value in found for each in shlex.split(value))


def parse_command(command: list[str]) -> Ragcache:
    """What the real command line makes of arguments of `ragcache`; exits where they are wrong."""
    return Ragcache(_cli_parse_args=command)


def queries() -> Iterator[tuple[str, str, str]]:
    """Dashboard or file, panel or alert, and PromQL of everything that is asked of Prometheus."""
    for path in DASHBOARDS:
        for panel in read(path)["panels"]:
            for target in panel.get("targets", ()):
                yield path.stem, panel["title"], expression(target["expr"])
    for group in read(PROMETHEUS / "alerts.yml")["groups"]:
        for rule in group["rules"]:
            yield "alerts", rule["alert"], rule["expr"]


def expression(text: str, window: str = "1m") -> str:
    """A panel's PromQL with Grafana's variables filled in."""
    return text.replace("$__rate_interval", window).replace("$instance", ".*")
