"""The services, as far as their description tells without being started."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic import ByteSize, TypeAdapter
from shipped import (
    COMPOSE,
    GPU,
    GRAFANA,
    PROMETHEUS,
    ROOT,
    arguments,
    interpolated,
    parse_command,
    read,
    services,
    variables,
)

from ragcache.config import ServeSettings

NAMES = sorted(services())
OURS = [name for name in NAMES if services()[name]["image"].startswith("ragcache-gateway:")]
VARIABLES = {
    "BIND",
    "PORT",
    "ROUTER_PORT",
    "PROMETHEUS_PORT",
    "GRAFANA_PORT",
    "GRAFANA_PASSWORD",
    "MEMORY",
}


def mounts(service: dict) -> list[list[str]]:
    return [volume.split(":") for volume in service.get("volumes", ())]


def has_profile(name: str, profile: str | None) -> bool:
    profiles = services()[name].get("profiles")
    return not profiles or profile in profiles


@pytest.mark.parametrize("path", [COMPOSE, GPU], ids=lambda path: path.name)
def test_it_is_what_the_compose_specification_allows(path):
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema"]
    run = subprocess.run([*command, "vendor.compose-spec", path], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_it_starts_with_no_variable_set():
    text = COMPOSE.read_text() + GPU.read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) == VARIABLES
    assert "${" not in interpolated(text)


def test_every_variable_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert [name for name in VARIABLES if f"`{name}`" not in readme] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_service_is_of_a_fixed_release_limited_checked_and_restarted(name):
    service = services()[name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", service["image"])
    assert service["restart"] == "unless-stopped"
    limits = service["deploy"]["resources"]["limits"]
    assert TypeAdapter(ByteSize).validate_python(f"{limits['memory']}b") >= 2**28
    assert limits["pids"] > 0
    if name in OURS:
        assert arguments("HEALTHCHECK")
    else:
        assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
    assert service["read_only"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_listens_beyond_this_machine_unless_asked_to(name):
    for port in services()[name].get("ports", ()):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)
    for port in read(COMPOSE)["services"][name].get("ports", ()):
        assert interpolated(port, BIND="0.0.0.0").startswith("0.0.0.0:")


def test_no_two_services_publish_the_same_port():
    ports = [port.split(":")[1] for name in NAMES for port in services()[name].get("ports", ())]
    assert len(ports) == len(set(ports)) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_what_a_service_needs_is_there_in_its_profile(name):
    service = services()[name]
    for other in service.get("depends_on", ()):
        assert other in NAMES
        assert all(has_profile(other, profile) for profile in service.get("profiles", [None]))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_mounted_exists(name):
    for source, target, *mode in mounts(services()[name]):
        assert target.startswith("/")
        if source.startswith("./"):
            assert (ROOT / source).exists()
            assert mode == ["ro"]
        else:
            assert source in read(COMPOSE)["volumes"]


def test_every_volume_is_used():
    used = {source for name in NAMES for source, *_ in mounts(services()[name])}
    assert read(COMPOSE)["volumes"].keys() <= used


def test_ours_are_built_under_the_version_of_the_project():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert OURS
    for name in OURS:
        assert services()[name]["image"] == f"ragcache-gateway:{version}"
    assert read(GPU)["x-ragcache"]["image"] == f"ragcache-gateway:{version}-gpu"


def test_one_service_builds_the_image_and_the_others_wait_for_it():
    """Builds of one tag run at the same time and fail; what nobody builds would be pulled."""
    builders = [name for name in OURS if "build" in services()[name]]
    assert builders == ["gateway"]
    build = services()["gateway"]["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).is_file()
    assert {services()[name].get("pull_policy") for name in OURS} == {None, "never"}
    assert "pull_policy" not in services()["gateway"]
    assert "profiles" not in services()["gateway"]
    assert [name for name, each in read(GPU)["services"].items() if "build" in each] == builders


@pytest.mark.parametrize("name", OURS)
def test_our_commands_are_those_of_the_real_command_line(name, monkeypatch):
    for variable, value in variables().items():
        monkeypatch.setenv(variable, value)
    command = services()[name]["command"]
    settings = parse_command(command)
    if command[0] == "serve":
        assert settings.serve.advertise_url == f"http://{name}:{settings.serve.port}"
        assert urlsplit(settings.serve.redis_url).hostname in NAMES
    else:
        replica = parse_command(services()["gateway"]["command"])
        assert settings.route.redis_url == replica.serve.redis_url


@pytest.mark.parametrize("name", OURS)
def test_our_services_write_only_where_they_may(name):
    service = services()[name]
    assert ["cache", variables()["XDG_CACHE_HOME"]] in mounts(service)
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", OURS)
def test_our_services_may_finish_before_they_are_killed(name):
    grace = int(services()[name]["stop_grace_period"].removesuffix("s"))
    assert grace > ServeSettings.model_fields["drain_timeout"].default


def test_the_gpu_variant_changes_our_services_and_gives_each_engine_a_gpu():
    gpu = read(GPU)
    assert sorted(gpu["services"]) == OURS
    assert {each["image"] for each in gpu["services"].values()} == {gpu["x-ragcache"]["image"]}
    devices = []
    for name in OURS:
        if services()[name]["command"][0] == "serve":
            resources = gpu["services"][name]["deploy"]["resources"]
            (device,) = resources["reservations"]["devices"]
            assert device["capabilities"] == ["gpu"]
            devices += device["device_ids"]
    assert len(devices) == len(set(devices)) == 2


def test_a_fleet_is_two_replicas_and_a_router():
    fleet = [name for name in OURS if has_profile(name, "fleet")]
    commands = [services()[name]["command"][0] for name in fleet]
    assert sorted(commands) == ["route", "serve", "serve"]
    assert [name for name in OURS if has_profile(name, None)] == ["gateway"]


def test_prometheus_scrapes_our_services_and_reads_its_rules():
    service, config = services()["prometheus"], read(PROMETHEUS / "prometheus.yml")
    assert ["./docker/prometheus", "/etc/prometheus", "ro"] in mounts(service)
    assert "--config.file=/etc/prometheus/prometheus.yml" in service["command"]
    assert ["prometheus", "/prometheus"] in mounts(service)
    assert "--storage.tsdb.path=/prometheus" in service["command"]
    job = next(each for each in config["scrape_configs"] if each["job_name"] == "ragcache")
    (targets,) = job["dns_sd_configs"]
    assert sorted(targets["names"]) == OURS
    assert [str(targets["port"])] == arguments("EXPOSE")
    assert all((PROMETHEUS / path).is_file() for path in config["rule_files"])


def test_grafana_asks_prometheus_and_shows_our_dashboards():
    service = services()["grafana"]
    (source,) = read(GRAFANA / "provisioning/datasources/prometheus.yml")["datasources"]
    (port,) = (port.split(":")[2] for port in services()["prometheus"]["ports"])
    assert source["url"] == f"http://prometheus:{port}"
    interval = read(PROMETHEUS / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = read(GRAFANA / "provisioning/dashboards/ragcache.yml")["providers"]
    assert ["./docker/grafana/dashboards", provider["options"]["path"], "ro"] in mounts(service)
    assert ["./docker/grafana/provisioning", "/etc/grafana/provisioning", "ro"] in mounts(service)
    home = service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"])
    assert (GRAFANA / "dashboards" / Path(home).name).is_file()


def test_redis_forgets_the_oldest_before_it_is_killed():
    command = services()["redis"]["command"]
    limit = TypeAdapter(ByteSize).validate_python(command[command.index("--maxmemory") + 1])
    allowed = services()["redis"]["deploy"]["resources"]["limits"]["memory"]
    assert limit < TypeAdapter(ByteSize).validate_python(f"{allowed}b")
    assert shlex.split(services()["redis"]["healthcheck"]["test"][1])[:2] == ["valkey-cli", "ping"]
