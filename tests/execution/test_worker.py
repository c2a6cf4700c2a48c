"""A thread for the event loop: in order, with errors, and gone in the end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from p2pllm.execution.worker import Worker

NAME = "test-worker"


def is_there() -> bool:
    return any(thread.name == NAME for thread in threading.enumerate())


async def test_one_after_the_other_in_one_thread() -> None:
    worker = Worker(NAME)
    assert not is_there()
    threads, done = set[int](), list[int]()

    def work(number: int, seconds: float) -> int:
        time.sleep(seconds)
        threads.add(threading.get_ident())
        done.append(number)
        return number * 2

    asked = [worker.run(work, number, 0.02 if number == 0 else 0.0) for number in range(20)]
    assert await asyncio.gather(*asked) == [number * 2 for number in range(20)]
    assert done == list(range(20))
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    await worker.close()
    assert not is_there()


async def test_an_error_is_the_caller_s_and_the_thread_goes_on() -> None:
    worker = Worker(NAME)
    with pytest.raises(ZeroDivisionError):
        await worker.run(divmod, 1, 0)
    assert await worker.run(divmod, 7, 2) == (3, 1)
    await worker.close()


async def test_what_was_asked_for_is_done_though_its_caller_left_and_closing_waits_for_it() -> None:
    worker = Worker(NAME)
    begun, may_end = threading.Event(), threading.Event()
    done: list[str] = []

    def first() -> None:
        begun.set()
        may_end.wait(5)
        done.append("first")

    running, waiting = worker.run(first), worker.run(done.append, "second")
    assert await asyncio.to_thread(begun.wait, 5)
    running.cancel()
    waiting.cancel()
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    may_end.set()
    await closing
    assert done == ["first", "second"]
    assert not is_there()
    await worker.close()
    with pytest.raises(RuntimeError, match="is closed"):
        worker.run(print)


def test_a_loop_that_has_gone_is_no_error_of_the_thread() -> None:
    may_end = threading.Event()
    worker = Worker(NAME)

    async def leave() -> None:
        worker.run(may_end.wait, 5)

    asyncio.run(leave())
    may_end.set()
    assert asyncio.run(asyncio.wait_for(ask(worker), 5)) == "still here"


async def ask(worker: Worker) -> str:
    answer = await worker.run(str, "still here")
    await worker.close()
    return answer
