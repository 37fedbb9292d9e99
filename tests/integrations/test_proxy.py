"""Gateways behind the proxy that the environment names."""

import pytest
from langchain_ragcache.failures import Unreachable
from langchain_ragcache.http import HttpGateway, Site

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
async def models(gateway, monkeypatch):
    """Ask nobody what is served, where the gateway is the proxy."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    async def ask(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        site = Site(NOBODY)
        try:
            return [entry["id"] for entry in await HttpGateway(site, {}).models()]
        finally:
            await site.close()

    return ask


async def test_the_proxy_of_the_environment_is_used(models, gateway):
    with pytest.raises(Unreachable):
        await models()
    assert await models(http_proxy=gateway.url) == ["tiny", "alias"]


async def test_there_are_hosts_without_a_proxy(models, gateway):
    with pytest.raises(Unreachable):
        await models(http_proxy=gateway.url, no_proxy="example.org,127.0.0.1")
    assert await models(no_proxy="example.org") == ["tiny", "alias"]
