"""Whatever a template does, it ends in time, and the next request is served."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmjax.errors import ChatTemplateError, InvalidRequest, QueueFull
from llmjax.templating.pool import RenderPool
from llmjax.templating.wire import Limits, RenderRequest
from tests.waiting import until_ended

USER = [{"role": "user", "content": "Hi"}]
PATIENT = Limits(cpu_seconds=3600, wall_seconds=3600)
BUSY = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LIMITS = Limits(cpu_seconds=0.1, memory=192 * 2**20, chars=2**20)


def request(source: str, text: str = "Hi", **variables: Any) -> RenderRequest:
    return RenderRequest(source=source, messages=[{"role": "user", "content": text}], variables=variables)


def pids(pool: RenderPool) -> list[int]:
    return [place._process.pid for place in pool._places if place is not None]


@pytest.fixture(scope="module")
def strict() -> Iterator[RenderPool]:
    """One process with tight limits."""
    pool = RenderPool(size=1, limits=LIMITS)
    yield pool
    pool.close()


def grown(start: str, step: str, end: str = "{{ ns.s }}", *, times: int = 60) -> str:
    """A value that is replaced many times by something made of itself; and the same once more, as ``ns.t``."""
    return (
        f"{{% set ns = namespace(s={start}, t={start}) %}}{{% for i in range({times}) %}}"
        f"{{% set ns.s = {step} %}}{{% set ns.t = {step.replace('ns.s', 'ns.t')} %}}{{% endfor %}}{end}"
    )


# They hold themselves twice, forty times over: small in memory, endless to walk.
LISTS = grown("[1]", "[ns.s, ns.s]", "", times=40)
OBJECTS = grown("[1]", "{1: ns.s, 2: ns.s}", "", times=40)
KEYS = grown("(1,)", "(ns.s, ns.s)", "", times=40)
LONG = "{% set s = 'ab' * 400000 %}"
MANY = "{% set r = range(99999)|list %}"

HOSTILE = {
    "endless loop": BUSY,
    "endless filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "endless map": "{{ range(99999)|map('string')|select('in', range(99999)|list)|list|length }}",
    "test is eq": LISTS + "{{ ns.s is eq ns.t }}",
    "test is in": MANY + "{% for i in r %}{{ -1 is in r }}{% endfor %}",
    "test is ge": LISTS + "{{ ns.s is ge ns.t }}",
    "test sameas after hash": KEYS + "{{ {ns.s: 1} }}",
    "nested dictionary keys": KEYS + "{% set d = {(ns.s, 1): 1} %}{{ d[(ns.t, 1)] }}",
    "nested dictionaries compared": OBJECTS + "{{ ns.s == ns.t }}",
    "count": MANY + "{% for i in r %}{{ r.count(-1) }}{% endfor %}",
    "count of text": LONG + "{% for i in range(99999) %}{{ s.count('ba') }}{% endfor %}",
    "index": MANY + "{% for i in r %}{{ r.index(99998) }}{% endfor %}",
    "find": LONG + "{% for i in range(99999) %}{{ (s ~ 'x').find('bx') }}{% endfor %}",
    "sort": MANY + "{% for i in r %}{{ r|sort(reverse=true)|first }}{% endfor %}",
    "sort by nested": LISTS + "{{ [ns.s, ns.t]|sort }}",
    "sum": MANY + "{% for i in r %}{{ r|sum }}{% endfor %}",
    "sum of lists": "{{ [[1] * 3000] * 30000 | sum(start=[]) }}{{ ([[1] * 3000] * 30000) | sum(start=[]) }}",
    "min and max": MANY + "{% for i in r %}{{ r|max }}{{ r|min }}{% endfor %}",
    "indent": "{{ ('a\n' * 100000)|indent(100000) }}",
    "groupby": MANY + "{% for i in r %}{{ r|groupby('x')|length }}{% endfor %}",
    "unique": MANY + "{% for i in r %}{{ r|unique|list|length }}{% endfor %}",
    "unique nested": KEYS + "{{ [ns.s, ns.t]|unique|list|length }}",
    "nested tojson": LISTS + "{{ ns.s|tojson }}",
    "nested objects as JSON": OBJECTS + "{{ ns.s|tojson(indent=4) }}",
    "nested lists shown": LISTS + "{{ ns.s }}",
    "nested lists compared": LISTS + "{{ ns.s == ns.t }}",
    "nested pprint": LISTS + "{{ ns.s|pprint }}",
    "huge range": "{% for i in range(1000000000) %}x{% endfor %}",
    "huge output": "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "huge hidden output": "{% set x %}{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}{% endset %}",
    "huge string": "{{ 'x' * 1000000000 }}",
    "huge list": "{{ [1] * 1000000000 }}",
    "huge power": "{{ 10 ** (10 ** 8) }}",
    "huge product": grown("99999999", "ns.s * ns.s"),
    "doubling by ~": grown("'xxxx'", "ns.s ~ ns.s"),
    "doubling by +": grown("'xxxx'", "ns.s + ns.s"),
    "doubling lists": grown("[1]", "ns.s + ns.s"),
    "replace": "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
    "replace method": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "join": "{{ range(90000)|join('y' * 1000000) }}",
    "join method": "{{ ('y' * 1000000).join(range(90000)|map('string')|list) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "date width": "{{ strftime_now('%1000000000d' * 1000) }}{{ 'x' * 1000000000 }}",
    "json indent": "{{ [1]|tojson(indent=1000000000) }}",
    "center": "{{ 'x'|center(1000000000) }}",
    "center method": "{{ 'x'.center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(100000) }}",
    "translate": LONG + "{% for i in range(99999) %}{{ s.translate({97: s}) }}{% endfor %}",
    "splitting": LONG + "{% for i in range(99999) %}{{ s.split('a')|length }}{% endfor %}",
    "words": "{% set s = 'a ' * 400000 %}{% for i in range(99999) %}{{ s|wordcount }}{% endfor %}",
    "wordwrap": "{% set s = 'a ' * 400000 %}{% for i in range(99999) %}{{ s|wordwrap(2) }}{% endfor %}",
    "urlize": "{{ ('www.a.bc ' * 40000)|urlize }}",
    "tags": "{{ ('<' * 400000)|striptags }}{% for i in range(99999) %}{{ ('<a' * 90000)|striptags }}{% endfor %}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "constant while compiling": "{% if false %}{{ 'x' * 10 ** 9 }}{{ 2 ** 10 ** 9 }}{% endif %}{{ [0] * 10 ** 9 }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "caller": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 30
    + "x"
    + "{% endcall %}" * 30,
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "attribute escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "global escape": "{{ raise_exception.__globals__['os'].system('true') }}",
    "context escape": "{{ self.__init__.__globals__ }}",
    "namespace escape": "{{ namespace(__class__=1) }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "undefined": "{{ x.y.z }}",
    "syntax": "\n{% for x in %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_an_error(strict: RenderPool, name: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        strict.render(request(HOSTILE[name]))
    assert caught.value.field == "chat_template" and str(caught.value).startswith("chat template: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 1000
    assert strict.render(request("{{ messages[0].content }}", "later")) == "later"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (BUSY, r"took more than 0\.1 s of computing time"),
        ("{{ [0] * 10 ** 9 }}", "needs more than 192 MiB of memory"),
        ("{% for i in range(2000) %}{{ 'x' * 1000 }}{% endfor %}", "makes more than 1048576 characters"),
        ("a\n{% for x in %}", "line 2: Expected an expression"),
        ("a\n\n{{ [] + 1 }}", "line 3: TypeError"),
        ("a\n{{ messages[0].x.y }}", "line 2: 'dict object' has no attribute 'x'"),
        ("{{ 1|nothing }}", "line 1: No filter named 'nothing'"),
    ],
)
def test_the_error_says_what_is_wrong(strict: RenderPool, source: str, says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says):
        strict.render(request(source))


def test_internals_are_out_of_reach(strict: RenderPool) -> None:
    for reach in (
        "''|attr('__class__')",
        "''['__class__']",
        "'{0.__class__}'.format('')",
        "dict.mro",
        "range.__init__",
    ):
        assert strict.render(request(f"{{{{ {reach} }}}}")) == ""


def test_the_process_stays_and_limits_are_of_each_rendering() -> None:
    pool = RenderPool(size=1, limits=LIMITS)
    pool.render(request("x"))
    before = pids(pool)
    work = "{% for i in range(20000) %}{% endfor %}" + "x" * 100
    for _ in range(100):  # together far more computing time than one may take
        pool.render(request(work))
    for source in ("{{ x.y }}", "{% for %}", "{{ raise_exception('no') }}"):
        with pytest.raises(InvalidRequest):
            pool.render(request(source))
    assert pids(pool) == before
    pool.close()


def test_a_process_that_keeps_too_much_makes_room() -> None:
    for kept, stays in ((1, False), (128 * 2**20, True)):
        pool = RenderPool(size=1, limits=Limits(kept_memory=kept))
        for text in ("a", "b"):
            assert pool.render(request("{{ messages[0].content }}", text)) == text
            assert bool(pids(pool)) is stays
        pool.close()


def test_a_large_server_has_small_processes() -> None:
    """On Linux a process is said to have held what its parent held when it started."""
    held = b"x" * (300 * 2**20)
    pool = RenderPool(size=1)
    pool.render(request("x"))
    assert len(held) and pids(pool)
    pool.close()


def test_a_process_killed_while_idle_is_nobodys_error() -> None:
    pool = RenderPool(size=1)
    pool.render(request("x"))
    (pid,) = pids(pool)
    os.kill(pid, signal.SIGKILL)
    until_ended(pid)
    assert pool.render(request("y")) == "y"
    pool.close()


@pytest.mark.parametrize("waiting", [False, True])
def test_a_process_that_hangs_is_given_up(waiting: bool) -> None:
    pool = RenderPool(size=1)
    pool.render(request("x"))
    (process,) = pool._places
    assert process is not None
    process._limits = Limits(wall_seconds=0.3)  # only now: starting and compiling may take longer
    os.kill(pids(pool)[0], signal.SIGSTOP)
    with pytest.raises(ChatTemplateError, match=r"more than 0\.3 s"):
        asyncio.run(pool.render_async(request("x"))) if waiting else pool.render(request("x" * 10**6))
    assert pids(pool) == []
    pool.close()


def test_threads_and_event_loops_share_a_pool() -> None:
    pool = RenderPool(size=2)
    answers: dict[str, str] = {}

    def one(name: str) -> None:
        answers[name] = pool.render(request("{{ messages[0].content }}", name))

    async def many(prefix: str) -> list[str]:
        requests = [request("{{ messages[0].content }}", f"{prefix}{i}") for i in range(40)]
        return await asyncio.gather(*[pool.render_async(r) for r in requests])

    threads = [threading.Thread(target=one, args=(f"thread {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    assert asyncio.run(many("first ")) == [f"first {i}" for i in range(40)]
    assert asyncio.run(many("second ")) == [f"second {i}" for i in range(40)]
    for thread in threads:
        thread.join()
    assert answers == {f"thread {i}": f"thread {i}" for i in range(8)}
    assert len(pids(pool)) <= 2
    pool.close()


async def busy(pool: RenderPool) -> asyncio.Task[str]:
    """Renders what does not end, in one of the pool's processes, which has begun."""
    (pid, *_) = reversed(pids(pool))  # the next one that is used
    before = computed(pid)
    task = asyncio.create_task(pool.render_async(request(BUSY)))
    while computed(pid) == before:
        await asyncio.sleep(0.005)
    return task


def computed(pid: int) -> int:
    """The computing time that a process has taken, in ticks of proc(5)."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")


@needs_proc
async def test_the_event_loop_runs_on() -> None:
    pool = RenderPool(size=2, limits=PATIENT)
    await asyncio.gather(*[pool.render_async(request("x")) for _ in range(2)])  # both processes have started
    hostile = await busy(pool)
    for text in "abcdef":  # others are served meanwhile, one after another
        assert await pool.render_async(request("{{ messages[0].content }}", text)) == text
    assert not hostile.done()
    hostile.cancel()
    pool.close()


@needs_proc
async def test_a_canceled_request_gives_its_place_back() -> None:
    pool = RenderPool(size=1, limits=PATIENT)
    await pool.render_async(request("x"))
    running = await busy(pool)
    waiting = [asyncio.create_task(pool.render_async(request("x"))) for _ in range(3)]
    while len(pool._waiting) < len(waiting):
        await asyncio.sleep(0)
    for task in (*waiting[:2], running):
        task.cancel()
    assert await waiting[2] == "x"
    assert await pool.render_async(request("y")) == "y"
    pool.close()


def test_nobody_waits_for_ever() -> None:
    pool = RenderPool(size=1, limits=Limits(wall_seconds=0.1))
    place = pool._claim()
    for _ in range(2):
        with pytest.raises(QueueFull):
            pool.render(request("x"))
        with pytest.raises(QueueFull):
            asyncio.run(pool.render_async(request("x")))
    pool._release(place.result())
    pool._limits = Limits()
    assert pool.render(request("x")) == asyncio.run(pool.render_async(request("x"))) == "x"
    pool.close()


async def test_long_texts_go_both_ways() -> None:
    pool = RenderPool(size=1)
    for text in ("é€𝄞" * 10**6, "\ud800"):
        assert await pool.render_async(request("{{ messages[0].content }}", text)) == text
        assert pool.render(request("{{ messages[0].content }}", text)) == text
    pool.close()


def test_the_process_knows_nothing_of_the_server() -> None:
    code = (
        "import llmjax.templating.worker, sys;"
        "print({'jax', 'numpy', 'tokenizers', 'llmjax.tokenizer', 'asyncio'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@needs_proc
def test_secrets_stay_in_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pool = RenderPool(size=1)
    pool.render(request("x"))
    environment = Path(f"/proc/{pids(pool)[0]}/environ").read_bytes()
    assert b"PYTHONPATH" in environment and b"hf_secret" not in environment
    pool.close()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()", "render_until_killed()"])
def test_no_process_outlives_the_server(end: str) -> None:
    code = f"""
import os, signal, sys, threading
from contextlib import suppress
from llmjax.errors import ChatTemplateError
from llmjax.templating.pool import RenderPool
from llmjax.templating.wire import Limits, RenderRequest
busy = RenderRequest(source={BUSY!r}, messages={USER!r})
pool = RenderPool(size=1, limits=Limits(cpu_seconds=0.5))
pool.render(RenderRequest(source="x", messages={USER!r}))
print(pool._places[0]._process.pid, flush=True)
def render_until_killed():
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        with suppress(ChatTemplateError):
            pool.render(busy)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    until_ended(int(done.stdout))
