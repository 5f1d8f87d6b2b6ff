"""Threads that compile: calls run in order, are dropped when closed, and are abandoned when the process ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import CancelledError

import pytest

from llmjax.engine.programs.threads import CompileThreads

pytestmark = pytest.mark.jax_api


def test_calls_run_in_order_and_bring_results_and_errors() -> None:
    threads = CompileThreads(1)
    seen: list[int] = []
    futures = [threads.submit(seen.append, i) for i in range(5)]
    assert threads.submit(divmod, 7, 2).result() == (3, 1)
    assert seen == [0, 1, 2, 3, 4] and all(future.done() for future in futures)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result()
    threads.close()
    threads.close()  # a second time does nothing


def test_closing_drops_what_has_not_begun() -> None:
    threads = CompileThreads(1)
    began, go_on = threading.Event(), threading.Event()

    def slow() -> int:
        began.set()
        go_on.wait()
        return 3

    first, second = threads.submit(slow), threads.submit(lambda: 4)
    began.wait()
    threads.close(wait=False)
    assert second.cancelled() and not first.done()
    with pytest.raises(CancelledError):
        second.result()
    go_on.set()
    threads.close()
    assert first.result() == 3


def test_who_forgets_to_close_ends_the_threads_as_well() -> None:
    threads = CompileThreads(2)
    workers = threads._threads
    threads.submit(int).result()
    del threads
    for worker in workers:
        worker.join()


def test_who_forgets_to_close_waits_for_nobody() -> None:
    """Garbage is collected anywhere, under locks that a call needs, too."""
    made, lock, began = [CompileThreads(1)], threading.Lock(), threading.Event()

    def needs_the_lock() -> None:
        began.set()
        with lock:
            pass

    forget = threading.Thread(target=made.clear, daemon=True)
    with lock:
        made[0].submit(needs_the_lock)
        began.wait()
        forget.start()
        forget.join()


def script(ending: str) -> subprocess.CompletedProcess[str]:
    """A process that ends like that, and its calls: ``call`` ends when one that waits is dropped."""
    code = f"""
        import sys, threading, time
        from llmjax.engine.programs.threads import CompileThreads, leave
        began, waiting = threading.Event(), []
        def call():
            began.set()
            while not waiting or not waiting[-1].cancelled():
                time.sleep(0.01)
            print("done", flush=True)
        {ending}
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)


def test_the_interpreter_waits_only_for_what_has_begun() -> None:
    done = script(
        "threads = CompileThreads(1); _ = threads.submit(call); began.wait();"
        "waiting.extend([threads.submit(call) for _ in range(1000)]); sys.exit(5)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "done\n", "")


def test_the_interpreter_waits_for_what_forgotten_threads_have_begun() -> None:
    done = script(
        "threads = CompileThreads(1); _ = threads.submit(call); began.wait();"
        "waiting.append(threads.submit(call)); del threads; sys.exit(5)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "done\n", "")


def test_a_process_can_leave_what_has_begun() -> None:
    done = script("threads = CompileThreads(2); threads.submit(call); began.wait(); print('bye'); leave(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "bye\n", "")
    done = script("CompileThreads(2).close(); leave(7)")
    assert (done.returncode, done.stdout) == (7, "")
