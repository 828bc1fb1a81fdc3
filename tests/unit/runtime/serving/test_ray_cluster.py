"""Joining Ray: processes that imported or joined it before."""

import sys
from types import SimpleNamespace

import pytest

from runtime.serving import ray_cluster
from runtime.serving.ray_cluster import ClusterError, HeadLost, HeadWatch, join


def test_join__rejects_a_ray_imported_without_a_token(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ClusterError, match="already imported without a token"):
        join(None, num_cpus=1, option="ray_address")


def test_join__leaves_an_initialized_ray_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert not join(None, num_cpus=1, option="ray_address")


class ScriptedHead:
    """A head whose answers are given, and a clock that each question moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.session: bytes | None = b"first"
        self.now, self.num_questions = 100.0, 0
        monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(HeadWatch, "_read_session", lambda _: self.answer())

    def answer(self) -> bytes | None:
        self.num_questions += 1
        if self.session is None:
            self.now += ray_cluster.HEAD_POLL_SECONDS
        return self.session


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> ScriptedHead:
    return ScriptedHead(monkeypatch)


def test_watch__asks_once_in_an_interval(head: ScriptedHead) -> None:
    watch = HeadWatch("head:6379")
    watch.check()
    assert head.num_questions == 1
    head.now += ray_cluster.HEAD_POLL_SECONDS
    watch.check()
    watch.check()
    assert head.num_questions == 2
    watch.check(at_once=True)
    assert head.num_questions == 3


def test_watch__gives_a_silent_head_time_to_return(head: ScriptedHead) -> None:
    watch = HeadWatch("head:6379")
    num_questions = int(ray_cluster.HEAD_SECONDS / ray_cluster.HEAD_POLL_SECONDS)
    for _ in range(2):
        head.session = None
        for _ in range(num_questions):
            assert not watch.check(at_once=True)
        assert not watch.check(), "nothing was asked since"
        head.session = b"first"
        assert watch.check(at_once=True)
        assert watch.check()
    head.session = None
    for _ in range(num_questions):
        watch.check(at_once=True)
    with pytest.raises(HeadLost, match=r"head:6379 has not answered for 45 seconds"):
        watch.check(at_once=True)


def test_watch__refuses_a_head_that_is_silent_or_another(head: ScriptedHead) -> None:
    watch = HeadWatch(None)
    head.session = b"second"
    with pytest.raises(HeadLost, match="at this machine was started again"):
        watch.check(at_once=True)
    head.session = None
    with pytest.raises(HeadLost, match="does not answer"):
        HeadWatch("head:6379")
