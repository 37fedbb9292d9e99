"""The real Prometheus, with the configuration that is shipped, against a gateway under load."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
import yaml
from shipped import PROMETHEUS, queries, read, services
from traffic import SYSTEM, ask, traffic

PATIENCE = 60.0  # seconds for something to become true

missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)}: not installed")


def until(condition: Callable[[], object], log: Path) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def api(busy, router, tmp_path_factory) -> Iterator[httpx2.Client]:
    """The API of a Prometheus that scrapes the gateway, with the shipped rules, every second."""
    config = deepcopy(read(PROMETHEUS / "prometheus.yml"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / path) for path in config["rule_files"]]
    (job,) = (each for each in config["scrape_configs"] if each["job_name"] == "ragcache")
    del job["dns_sd_configs"], job["relabel_configs"]
    targets = [busy.url.removeprefix("http://"), router.base_url.netloc.decode()]
    job["static_configs"] = [{"targets": targets}]
    config["scrape_configs"] = [job]
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        httpx2.Client(base_url=f"http://{address}") as client,
    ):
        try:
            until(lambda: is_healthy(client), folder / "log")
            up = 'up{job="ragcache"} == 1'
            until(lambda: len(values(client, up)) == len(targets), folder / "log")
            yield client
        finally:
            process.terminate()


def is_healthy(api: httpx2.Client) -> bool:
    """What the health check of the compose file asks."""
    url = services()["prometheus"]["healthcheck"]["test"][-1]
    try:
        return api.get(urlsplit(url).path).is_success
    except httpx2.ConnectError:
        return False


def values(api: httpx2.Client, query: str) -> list[float]:
    """What an instant query gives, numbers only."""
    answer = api.get("/api/v1/query", params={"query": query}).raise_for_status().json()
    found = (float(series["value"][1]) for series in answer["data"]["result"])
    return [value for value in found if not math.isnan(value)]


def test_promtool_accepts_the_configuration_and_the_rules():
    command = ["promtool", "check", "config", PROMETHEUS / "prometheus.yml"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_every_panel_shows_data_and_every_rule_is_evaluated(api, busy, router):
    panels = [each for each in queries() if each[0] != "alerts"]
    for attempt in range(30):
        traffic(busy.http, busy.model, f"Berta {attempt}")
        ask(router, SYSTEM, f"Who is Berta {attempt}?")
        time.sleep(1.5)  # a scrape sees it
        empty = [(where, title) for where, title, query in panels if not values(api, query)]
        if not empty:
            break
    assert not empty
    (group,) = api.get("/api/v1/rules").json()["data"]["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    states = {rule["name"]: rule["state"] for rule in group["rules"]}
    assert states["GatewayMissing"] == states["GatewayNotReady"] == "inactive"
    assert states["RequestsFail"] == states["RequestsRefused"] == "pending"


def test_the_hit_rate_is_the_same_under_vllms_names(api, busy):
    hits = "vllm:prefix_cache_hits_total + vllm:external_prefix_cache_hits_total"
    (theirs,) = values(api, f"({hits}) / vllm:prefix_cache_queries_total")
    (ours,) = values(
        api, "ragcache_prefix_cache_hit_tokens_total / ragcache_prefix_cache_query_tokens_total"
    )
    assert theirs == pytest.approx(ours)
    assert 0 < ours < 1
