"""The engine in a real process of its own, on a tiny random model."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny_engine import CONFIG, GREEDY, make_prompts, mlx_lm_answer, mlx_lm_model
from tiny_models import write_checkpoint

from mlx_paged.engine.params import SamplingParams
from mlx_paged.server.engine_client import EngineClient, LatestView
from mlx_paged.server.messages import PoolView, Start, Token
from mlx_paged.server.token_stream import (
    EngineDied,
    EngineUnavailable,
    QueueFull,
    RequestRefused,
    TokenStream,
)

OPTIONS = {"block_size": 4, "num_blocks": 64}
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
BOUND = 30.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny") / "m", CONFIG, mlx_lm_model()))


@pytest.fixture(scope="module")
def run(checkpoint):
    """Runs coroutine functions of a client, all on one engine process."""
    loop = asyncio.new_event_loop()
    client = EngineClient(Start(checkpoint, None, OPTIONS), max_waiting=3)
    loop.run_until_complete(client.start())
    yield lambda test: loop.run_until_complete(asyncio.wait_for(test(client), BOUND))
    loop.run_until_complete(client.stop())
    loop.close()


async def answer(client, prompt, params=GREEDY, request_id="a"):
    with client.open(request_id, prompt, params) as stream:
        return [token.token_id async for tokens in stream for token in tokens]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def pool_is_free(client):
    """Waits until the engine itself says that no block is used."""
    async with client.views() as views:
        async for view in views:
            if view.stats.num_blocks_used == 0 and not view.tables:
                return


def test_many_requests_get_the_tokens_of_mlx_lm(run):
    prompts = make_prompts(6)

    async def test(client):
        client.max_waiting = 100
        answers = await asyncio.gather(
            *(answer(client, prompt, request_id=str(i)) for i, prompt in enumerate(prompts))
        )
        client.max_waiting = 3
        assert client.num_open == 0
        return answers

    assert run(test) == [mlx_lm_answer(prompt, GREEDY.max_tokens) for prompt in prompts]


def test_the_engine_describes_itself(run):
    async def test(client):
        await until(lambda: client.stats is not None)
        return client

    client = run(test)
    assert (client.info.block_size, client.info.num_blocks) == (4, 64)
    assert client.info.vocab_size == 260 and client.info.attention == "gather"
    assert client.not_ready is None
    assert client.stats.num_blocks == 64


def test_what_can_never_run_is_refused(run):
    async def test(client):
        with pytest.raises(RequestRefused, match="the pool has 64"):
            await answer(client, [1] * 300)
        with pytest.raises(RequestRefused, match="64 bits"):
            client.open("b", [1], SamplingParams(seed=2**70))
        assert client.num_open == 0

    run(test)


def test_leaving_a_stream_frees_its_blocks(run):
    async def test(client):
        with client.open("a", [1, 2, 3], LONG) as stream:
            await anext(stream)
            assert client.num_open == 1
        assert client.num_open == 0
        await pool_is_free(client)

    run(test)


def test_a_cancelled_reader_frees_its_blocks(run):
    async def test(client):
        reader = asyncio.create_task(answer(client, [1, 2, 3], LONG))
        await until(lambda: client.num_open)
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader
        await pool_is_free(client)

    run(test)


def test_a_stopped_sample_ends_and_the_other_goes_on(run):
    async def test(client):
        lengths = {0: 0, 1: 0}
        params = SamplingParams(n=2, max_tokens=40, ignore_eos=True, seed=1)
        with client.open("a", [1, 2], params) as stream:
            async for tokens in stream:
                for token in tokens:
                    lengths[token.index] += 1
                stream.stop_sample(0)
        await pool_is_free(client)
        return lengths

    lengths = run(test)
    assert lengths[0] < 40 == lengths[1]


def test_too_many_waiting_requests_are_refused_with_a_time_to_come_back(run):
    async def test(client):
        with contextlib.ExitStack() as stack:
            for i in range(3):
                stack.enter_context(client.open(str(i), [1], LONG))
            with pytest.raises(QueueFull, match="3 requests wait") as error:
                client.open("d", [1], LONG)
            assert error.value.retry_after >= 1
        assert await answer(client, [1], SamplingParams(max_tokens=2, ignore_eos=True))

    run(test)


def test_watchers_see_the_tables_of_what_runs(run):
    async def requests(client):
        while True:
            await answer(client, [1, 2, 3], LONG)

    async def test(client):
        running = asyncio.create_task(requests(client))
        tables = []
        async with client.views() as views:
            async for view in views:
                tables += view.tables
                if len(tables) == 3:
                    break
        running.cancel()
        await pool_is_free(client)
        return tables

    tables = run(test)
    for table in tables:
        assert (table.request_id, table.num_prompt_tokens) == ("a", 3)
        assert len(table.block_table) >= table.num_stored_tokens / 4
    assert len({table.num_tokens for table in tables}) > 1


def test_a_killed_engine_ends_open_requests_with_an_error_and_is_started_again(checkpoint):
    async def test():
        client = EngineClient(Start(checkpoint, None, OPTIONS))
        assert client.not_ready == "the model loads"
        with pytest.raises(EngineUnavailable, match="the model loads"):
            client.open("early", [1], GREEDY)
        await client.start()
        try:
            with client.open("a", [1, 2, 3], LONG) as stream:
                await anext(stream)
                os.kill(client.engine_pid, signal.SIGKILL)
                with pytest.raises(EngineDied, match="ended by SIGKILL"):
                    async for _ in stream:
                        pass
            assert client.num_open == 0
            assert "SIGKILL; it is starting again" in client.not_ready
            with pytest.raises(EngineUnavailable, match="starting again"):
                client.open("b", [1], GREEDY)
            await until(lambda: client.not_ready is None)
            assert client.num_restarts == 1
            assert await answer(client, [1, 2, 3]) == mlx_lm_answer([1, 2, 3], 12)
            with client.open("late", [1, 2, 3], LONG) as stream:
                await anext(stream)
                await client.stop()
                with pytest.raises(EngineDied, match="shutting down"):
                    async for _ in stream:
                        pass
            assert client.engine_pid is None
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(test(), BOUND))


def test_a_model_that_can_not_be_loaded_is_one_error():
    async def test():
        client = EngineClient(Start("/nowhere/at/all", None, {}))
        with pytest.raises(EngineDied, match="/nowhere/at/all"):
            await client.start()
        await client.stop()
        assert client.num_restarts == 0

    asyncio.run(asyncio.wait_for(test(), BOUND))


def test_the_engine_ends_with_its_server(checkpoint):
    """Even if the server is killed: no engine is left behind with the memory."""
    script = f"""
import asyncio
from mlx_paged.server.engine_client import EngineClient
from mlx_paged.server.messages import Start

async def main():
    client = EngineClient(Start({checkpoint!r}, None, {OPTIONS!r}))
    await client.start()
    print(client.engine_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    engine_pid = int(server.stdout.readline())
    os.kill(engine_pid, 0)
    server.kill()
    server.wait()
    server.stdout.close()
    deadline = time.monotonic() + 10
    while is_running(engine_pid):
        assert time.monotonic() < deadline, "the engine outlives its server"
        time.sleep(0.05)


def is_running(pid):
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return status.stdout.strip()[:1] not in ("", "Z")


def test_the_engine_is_told_of_what_is_not_wanted_any_more_and_nothing_else():
    async def test():
        dropped, closed = [], []
        stream = TokenStream("a", 3, lambda *what: dropped.append(what), closed.append)
        stream.stop_sample(1)
        stream.stop_sample(1)
        stream.put(Token("a", 0, 5, None, "length"))
        assert (dropped, closed) == ([("a", 1)], [])
        stream.close()
        stream.close()
        assert (dropped, closed) == ([("a", 1), ("a", None)], ["a"])
        whole = TokenStream("b", 1, lambda *what: dropped.append(what), closed.append)
        whole.put(Token("b", 0, 5, None, "stop"))
        whole.close()
        assert (len(dropped), closed) == (2, ["a", "b"])

    asyncio.run(test())


def test_tokens_that_came_before_an_error_are_read_first():
    async def test():
        stream = TokenStream("a", 2, lambda *_: None, closed.append)
        stream.put(Token("a", 0, 5))
        stream.fail(EngineDied("gone"))
        assert [token.token_id for token in await anext(stream)] == [5]
        with pytest.raises(EngineDied):
            await anext(stream)
        stream.close()

    closed = []
    asyncio.run(test())
    assert closed == ["a"]


def test_a_slow_watcher_gets_the_newest_view_and_all_copies(run):
    async def test(client):
        view = LatestView()
        for i in range(3):
            view.put(PoolView(client.stats, [(i, 1)], [], [(i, i + 10)]))
        newest = await anext(view)
        assert newest.cached == [(2, 1)]
        assert newest.copies == [(0, 10), (1, 11), (2, 12)]
        view.end()
        with pytest.raises(StopAsyncIteration):
            await anext(view)

    run(test)
