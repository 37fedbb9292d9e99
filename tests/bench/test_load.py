import aiohttp
import pytest

from ragcache.bench.client import ChatClient, RequestFailed
from ragcache.bench.load import Load
from ragcache.bench.workload import Workload

WORKLOAD = Workload("be brief", tuple((f"first {s}", f"second {s}") for s in range(6)))


@pytest.fixture
async def load(fake):
    async with aiohttp.ClientSession() as http:
        client = ChatClient(http, fake.url, "made-up")
        yield Load(client, concurrency=2, max_tokens=3, salt=lambda: "s", on_reply=lambda: None)


async def test_every_turn_is_sent_once_in_order_of_its_session(load):
    exchanges, wall = await load.play(WORKLOAD)
    assert sorted((e.session, e.turn) for e in exchanges) == [
        (s, t) for s in range(6) for t in range(2)
    ]
    sent = [exchange.reply.sent_at for exchange in exchanges]
    assert sent == sorted(sent)
    assert wall > max(e.reply.ttft for e in exchanges)


async def test_the_history_grows_by_real_answers(load):
    exchanges, _ = await load.play(WORKLOAD)
    first, second = sorted((e for e in exchanges if e.session == 3), key=lambda e: e.turn)
    assert [m["role"] for m in second.messages] == ["system", "user", "assistant", "user"]
    assert second.messages[2]["content"] == first.reply.text
    assert second.messages[:2] == first.messages


async def test_no_more_than_concurrency_requests_are_in_flight(load, fake):
    await load.play(WORKLOAD)
    assert fake.most_running == 2


async def test_the_first_failure_ends_the_run(load, fake):
    fake.refusal = (500, "broken")
    with pytest.raises(RequestFailed, match="HTTP 500: broken"):
        await load.play(WORKLOAD)
    assert len(fake.requests) < 12
