"""The command: text or an object, and the status that says whether anything can be served."""

from __future__ import annotations

import json
import re

import pytest
from ragcache_kernels.native.library import supported_tiers
from redis_pool import RedisServer

from ragcache import cli
from ragcache.bench.settings import apart
from ragcache.doctor.diagnosis import diagnose


@pytest.fixture
def doctor(monkeypatch, capsys, tiny_llama):
    """Run it in this process; its status and output."""

    def run(*arguments: str, **variables: str) -> tuple[int, str]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr("sys.argv", ["ragcache", "doctor", str(tiny_llama), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


def test_it_says_what_would_run(doctor):
    status, out = doctor("--dtype", "float32")
    assert status == 0
    assert "float32: asked for" in out
    assert "it is for CUDA devices" in out
    assert "Cannot serve" not in out


def test_it_takes_the_variables_of_serve_and_no_other(doctor):
    status, out = doctor("--json", RAGCACHE_DTYPE="float16", JSON="false")
    plan = json.loads(out)["plan"]
    assert (status, plan["dtype"]) == (0, "float16")
    assert plan["others"].keys() | {plan["backend"]} >= {"torch", "triton"}


def test_it_says_whether_drafts_are_tried(doctor):
    assert re.search("drafts +none: asked for", doctor("--speculative-tokens", "0")[1])
    assert re.search("drafts +(none|up to 8 tokens): ", doctor()[1])


@pytest.mark.skipif(not supported_tiers(), reason="the C kernels were not built")
def test_quantization_is_said_where_it_is_set(doctor):
    assert "quantization" not in doctor()[1]
    status, out = doctor("--quantization", "int8", "--device", "cpu", "--dtype", "bfloat16")
    assert status == 0
    assert "products in int8, the embedding in bfloat16" in out


def test_what_cannot_be_served_ends_with_status_1_and_the_reason(doctor):
    status, out = doctor("--max-model-len", "1000000")
    assert status == 1
    assert "Cannot serve: max_model_len: 1000000 exceeds" in out


def test_a_file_of_keys_that_is_not_there_keeps_serve_from_starting(doctor, tmp_path):
    status, out = doctor("--json", "--api-keys-file", str(tmp_path / "keys"))
    found = json.loads(out)
    assert status == 1
    assert "api_keys_file" in found["problems"][0]
    assert found["plan"] is not None


def test_a_redis_that_is_away_is_a_warning(doctor, tmp_path):
    status, out = doctor(RAGCACHE_REDIS_URL=f"unix://{tmp_path}/away")
    assert status == 0
    assert "does not answer" in out
    assert "this replica stands alone" in out


def test_a_wrong_redis_url_keeps_serve_from_starting(doctor):
    status, out = doctor("--redis-url", "http://localhost")
    assert status == 1
    assert "Cannot serve: redis_url" in out


def test_a_redis_that_answers_says_who_lives_there(tiny_llama):
    server = RedisServer()
    server.start()
    try:
        found = diagnose(apart(model=str(tiny_llama), redis_url=server.url))
    finally:
        server.close()
    assert found.redis is not None
    assert (found.redis.replicas, found.redis.error) == (0, None)
    assert not any("answer" in each.problem for each in found.warnings)
