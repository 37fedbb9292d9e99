"""API keys, and the tenants that they stand for."""

import hashlib

import pytest

from ragcache.errors import ConfigError, Unauthorized
from ragcache.gateway.tenants import Tenants, read_keys


def tenant(tenants, key):
    return tenants.tenant({"x-api-key": key})


def test_several_keys_are_one_tenant_and_the_others_their_own():
    tenants = Tenants(["team:one", "team:two", "three", "other-team:four", "team"])
    assert tenant(tenants, "one") == tenant(tenants, "two")
    names = [tenant(tenants, key) for key in ("one", "three", "four", "team")]
    assert len(set(names)) == 4
    assert not any(word in name for name in names for word in ("team", "one", "three"))


def test_the_tenant_is_no_part_of_the_key():
    tenants = Tenants(["team:one"])
    for key in ("team:one", "team", ":one", ""):
        with pytest.raises(Unauthorized):
            tenant(tenants, key)


def test_a_tenant_is_the_same_whatever_other_keys_there_are():
    assert tenant(Tenants(["team:one"]), "one") == tenant(Tenants(["x", "team:two"]), "two")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["good", " "], "number 2: the key is empty"),
        (["team:"], "number 1: the key is empty"),
        ([":secret"], "the tenant in front of ':' must be"),
        (["a team:secret"], "the tenant in front of ':' must be"),
        (["a:secret", "b:secret"], "number 2: another tenant has this key already"),
        (["a:secret", "secret"], "number 2: another tenant has this key already"),
    ],
)
def test_a_bad_key_is_told_by_its_number_and_never_shown(keys, why):
    with pytest.raises(ConfigError) as caught:
        Tenants(keys)
    assert why in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_tenant_that_is_shown_is_no_quick_digest_of_its_key():
    shown = tenant(Tenants(["guessable"]), "guessable")
    quick = {hashlib.new(name, b"guessable").hexdigest() for name in ("sha256", "sha1", "md5")}
    assert not any(digest.startswith(shown) for digest in quick)
    assert shown == tenant(Tenants(["other", "guessable"]), "guessable")
    assert len(shown) == 16


def test_the_log_tells_how_many_tenants_the_keys_make(caplog):
    caplog.set_level("INFO", "ragcache")
    Tenants(["team:one", "team:two", "three"])
    Tenants()
    assert [each.getMessage() for each in caplog.records] == ["API keys: 3, of 2 tenants"]


def test_a_key_may_be_given_twice():
    assert tenant(Tenants(["team:one", "team:one"]), "one")


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_file_has_one_key_on_a_line(tmp_path, mark):
    file = tmp_path / "keys"
    file.write_text(f"{mark}team:zero")
    assert read_keys(file) == ["team:zero"]
    file.write_text(f"{mark}# ours\nteam:one\n\n  two  \r\n\t# theirs: none\nteam:three")
    assert read_keys(file) == ["team:one", "two", "team:three"]


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b"# nothing\n\n", "has no key"), (b"\xff\xfesecret", "is not UTF-8")],
)
def test_a_file_without_keys_is_one_clear_error(tmp_path, content, why):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"api_keys_file: .*keys: {why}") as caught:
        read_keys(file)
    assert "secret" not in str(caught.value)
