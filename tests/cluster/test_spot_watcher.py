"""The spot watcher: what EC2 announces is passed on to Ray once, whatever fails in between."""

import logging
import time

import pytest
from fake_metadata import INTERRUPTION, FakeMetadata

from trishul_ray.cluster.spot_watcher import InstanceMetadata, Notice, read_notice, watch

NODE = "ab" * 28


class FakeCluster:
    """A cluster whose node appears, fails and ends as scripted."""

    def __init__(self, metadata, script, there):
        self.metadata, self.script, self.there = metadata, list(script), there
        self.alive, self.drained = True, []
        self.refuses = None

    def pause(self, _):
        """Go on with the script at each look; the node ends after the last line."""
        if self.script:
            self.script.pop(0)(self)
        else:
            self.alive = False

    def find_node(self, metadata):
        return NODE if self.there else None

    def is_alive(self, node):
        return self.alive

    def drain(self, node, notice):
        if self.refuses is not None:
            raise self.refuses
        self.drained.append((node, notice))


@pytest.fixture
def served():
    with FakeMetadata() as metadata:
        yield metadata


@pytest.fixture
def run(served):
    """``run(*script)`` -> the cluster, after a watch; each line of the script changes something."""

    def begin(*script, url=served.url, there=True, **options):
        cluster = FakeCluster(served, script, there)
        watch(InstanceMetadata(url), cluster, pause=cluster.pause, **options)
        return cluster

    return begin


def interrupt(cluster):
    cluster.when = cluster.metadata.interrupt()


def recommend(cluster):
    cluster.metadata.recommend_rebalance()


def nothing(cluster):
    pass


def test_without_a_notice_nothing_is_drained(run):
    assert run(nothing, nothing).drained == []


def test_a_notice_drains_the_node_once_with_its_time(run):
    cluster = run(nothing, interrupt, nothing, nothing)
    notice = Notice("EC2 will terminate this spot instance", cluster.when)
    assert cluster.drained == [(NODE, notice)]


def test_a_recommendation_drains_without_a_time_and_the_notice_follows(run):
    cluster = run(recommend, nothing, interrupt, nothing)
    assert [notice.when for _, notice in cluster.drained] == [None, cluster.when]
    assert "rebalance" in cluster.drained[0][1].message


def test_a_recommendation_may_be_ignored(run):
    assert run(recommend, nothing, rebalance=False).drained == []


def test_a_notice_that_cannot_be_read_is_a_notice_of_two_minutes(run):
    def garble(cluster):
        cluster.metadata.pages[INTERRUPTION] = "{"

    ((_, notice),) = run(garble, nothing).drained
    assert 100 < notice.when - time.time() <= 120


def test_a_node_that_starts_later_is_found(run):
    def appear(cluster):
        assert cluster.drained == []
        cluster.there = True

    cluster = run(interrupt, appear, nothing, nothing, there=False)
    assert len(cluster.drained) == 1


def test_what_fails_is_tried_again_and_reported_once(run, caplog):
    def refuse(cluster):
        interrupt(cluster)
        cluster.refuses = RuntimeError("the control service does not answer\nin time")

    def accept(cluster):
        cluster.refuses = None

    with caplog.at_level(logging.WARNING):
        cluster = run(refuse, nothing, nothing, accept, nothing)
    assert len(cluster.drained) == 1
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "the control service does not answer; trying again every 5 s"
    assert len(said) == 2 and "draining node" in said[1]


def test_metadata_that_cannot_be_reached_are_tried_again(run, served, caplog):
    with caplog.at_level(logging.WARNING):
        assert run(nothing, nothing, url="http://127.0.0.1:9").drained == []
    (record,) = caplog.records
    assert record.getMessage().startswith("the instance metadata cannot be reached: ")


def test_a_token_that_has_expired_is_renewed(served, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # never used for metadata
    metadata = InstanceMetadata(served.url)
    assert read_notice(metadata) is None and served.tokens == 1
    served.token = "second"
    when = served.interrupt()
    assert read_notice(metadata).when == when and served.tokens == 2
    assert metadata.get("/latest/meta-data/local-ipv4") == "10.0.0.7" and served.tokens == 2
