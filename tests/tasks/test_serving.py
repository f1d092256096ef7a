"""Serving: when a GPU counts as held, when as clear, and how a service hears of its target."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks.cluster import Service
from tasks.serving import (
    NO_TARGET,
    NOTHING_OBSERVED,
    Observed,
    ServingError,
    blockers,
    held,
    observed,
    observed_key,
    publish_target,
    service_names,
    slow_to_leave,
    target,
    target_key,
    write_observed,
)
from tasks.storage import Storage, open_storage
from tests.tasks.local_server import Asked, LocalServer, Reply, local_server

NOW = datetime(2026, 12, 1, 6, tzinfo=UTC)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def service(name: str = "chat", webhook: str | None = None) -> Service:
    return Service.model_validate(
        {
            "name": name,
            "demand": {"file": "load.csv"},
            "expected_gpus": 1,
            "ramp_per_hour": 1,
            "priority": 1,
            "target": {"webhook": webhook},
        }
    )


CHAT = service()


def give(storage: Storage, *gpus: int, to: Service = CHAT) -> int:
    """Publish these GPUs of node0."""
    return publish_target(storage, to.name, {"node0": list(gpus)}, NOW, to.target.webhook)


def say(storage: Storage, version: int, *gpus: int, name: str = "chat") -> None:
    """Let the service say that it holds these GPUs of node0."""
    write_observed(storage, name, NOW, Observed(version, {"node0": frozenset(gpus)} if gpus else {}))


def holds(storage: Storage) -> list[int]:
    return sorted(held(storage, "chat").get("node0", set()))


def clear(storage: Storage, gpus: range = range(8)) -> list[int]:
    """The GPUs of node0 that a job could start on."""
    return [gpu for gpu in gpus if not blockers(storage, "node0", [gpu])]


def test_a_target_is_written_as_the_protocol_says(storage: Storage) -> None:
    publish_target(storage, CHAT.name, {"node1": [3], "node0": [1, 0], "node2": []}, NOW)
    assert json.loads(storage.read("serving/chat/target.json")) == {
        "service": "chat",
        "version": 1,
        "gpus": {"node0": [0, 1], "node1": [3]},
        "leaving": {},
        "at": "2026-12-01T06:00:00Z",
    }


def test_the_version_grows_only_when_the_gpus_change(storage: Storage) -> None:
    assert [give(storage, *gpus) for gpus in ([0, 1], [1, 0], [0], [0], [0, 1])] == [1, 1, 2, 2, 3]


def test_a_gpu_taken_away_is_held_until_the_service_acted_on_that_target_and_is_seen_without_it(
    storage: Storage,
) -> None:
    give(storage, 0, 1, 2)
    assert holds(storage) == [0, 1, 2]
    say(storage, 1, 0, 1, 2)
    give(storage, 0)
    assert target(storage, "chat").leaving == {"node0": {1, 2}}
    assert holds(storage) == [0, 1, 2]  # has not heard of it
    say(storage, 1, 0)
    assert holds(storage) == [0, 1, 2]  # a word about an older target proves nothing
    say(storage, 2, 0, 1, 2)
    assert holds(storage) == [0, 1, 2]  # has heard, drains
    say(storage, 2, 0, 2)
    assert holds(storage) == [0, 2]
    assert clear(storage, range(4)) == [1, 3]
    say(storage, 2, 0)
    assert clear(storage, range(4)) == [1, 2, 3]


def test_what_is_not_proven_left_stays_leaving_in_the_next_target(storage: Storage) -> None:
    give(storage, 0, 1, 2)
    give(storage, 0, 1)
    give(storage, 0)
    assert target(storage, "chat").leaving == {"node0": {1, 2}}
    say(storage, 3, 0, 2)
    give(storage)
    assert target(storage, "chat").leaving == {"node0": {0, 2}}


def test_a_gpu_given_back_is_no_longer_leaving_and_its_next_departure_needs_its_own_proof(
    storage: Storage,
) -> None:
    give(storage, 0, 1)
    give(storage, 0)
    say(storage, 2, 0)
    assert give(storage, 0, 1) == 3
    assert target(storage, "chat").leaving == {}
    give(storage, 0)
    assert holds(storage) == [0, 1]


def test_a_gpu_that_the_service_says_it_holds_is_held_whether_it_was_given_or_not(storage: Storage) -> None:
    say(storage, 0, 5)
    assert holds(storage) == [5]
    give(storage, 0)
    assert target(storage, "chat").leaving == {"node0": {5}}
    say(storage, 1, 0, 5)
    assert holds(storage) == [0, 5]


def test_a_version_that_was_never_given_proves_nothing_and_the_next_one_is_above_it(storage: Storage) -> None:
    give(storage, 0, 1)
    give(storage, 0)
    say(storage, 9, 0)
    assert holds(storage) == [0, 1]
    assert give(storage, 0) == 10
    assert holds(storage) == [0, 1]
    say(storage, 10, 0)
    assert holds(storage) == [0]


def test_a_target_that_was_deleted_does_not_begin_again_at_one(storage: Storage) -> None:
    give(storage, 0, 1)
    give(storage, 0, 1, 2)
    say(storage, 2, 0, 1, 2)
    storage.delete(target_key("chat"))
    assert give(storage, 0) == 3
    assert holds(storage) == [0, 1, 2]


TORN = {
    "half of it": b'{"version": 2, "gpus": {"node0": [',
    "empty": b"",
    "not text": b"\xff\xfe",
    "a list": b"[]",
    "nothing": b"null",
    "no version": b'{"gpus": {}, "leaving": {}}',
    "a version in words": b'{"version": "2", "gpus": {}, "leaving": {}}',
    "true as a version": b'{"version": true, "gpus": {}, "leaving": {}}',
    "no gpus": b'{"version": 2}',
    "gpus as a list": b'{"version": 2, "gpus": [0, 1], "leaving": {}}',
    "gpus in words": b'{"version": 2, "gpus": {"node0": "01"}, "leaving": {}}',
    "a negative gpu": b'{"version": 2, "gpus": {"node0": [-1]}, "leaving": {}}',
    "half a gpu": b'{"version": 2, "gpus": {"node0": [0.5]}, "leaving": {}}',
    "lists in lists": b'{"version": 2, "gpus": {"node0": [[0]]}, "leaving": {}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", TORN.values(), ids=TORN.keys())
def test_an_observation_that_cannot_be_read_clears_nothing(storage: Storage, content: bytes) -> None:
    give(storage, 0, 1)
    give(storage, 0)
    storage.write(observed_key("chat"), content)
    assert observed(storage, "chat") == NOTHING_OBSERVED
    assert holds(storage) == [0, 1]
    assert clear(storage, range(3)) == [2]


@pytest.mark.parametrize("content", TORN.values(), ids=TORN.keys())
def test_a_target_that_cannot_be_read_blocks_every_gpu_until_a_new_one_is_acted_on(
    storage: Storage, content: bytes
) -> None:
    give(storage, 0, 1)
    say(storage, 1, 0, 1)
    storage.write(target_key("chat"), content)
    assert target(storage, "chat") == NO_TARGET
    assert clear(storage) == []
    version = give(storage, 0)
    assert version > 2
    assert clear(storage) == []  # it may have taken GPUs that only the lost target named
    assert give(storage, 0, 2) == version + 1
    assert clear(storage) == []
    say(storage, version + 1, 0, 2, 1)
    assert clear(storage, range(5)) == [3, 4]


def test_without_any_service_every_gpu_is_clear(storage: Storage) -> None:
    assert blockers(storage, "node0", range(8)) == []
    assert target(storage, "chat") == NO_TARGET
    assert held(storage, "chat") == {}


def test_blockers_say_who_holds_what_and_why(storage: Storage) -> None:
    give(storage, 0, 1)
    give(storage, 0)
    give(storage, 2, to=service("search"))
    assert blockers(storage, "node0", [0, 1, 2, 3]) == [
        "chat: node0 GPU 0 given to it",
        "chat: node0 GPU 1 not left yet (target 2, nothing observed)",
        "search: node0 GPU 2 given to it",
    ]
    say(storage, 1, 0, 1)
    assert blockers(storage, "node0", [1]) == ["chat: node0 GPU 1 not left yet (target 2, acted on 1)"]
    assert blockers(storage, "node0", [3]) == []
    assert blockers(storage, "node1", [0, 1, 2]) == []


def test_other_objects_below_serving_are_no_services(storage: Storage) -> None:
    storage.write("serving/readme.txt", b"")
    storage.write("serving/chat/old/target.json", b"")
    assert service_names(storage) == []
    say(storage, 1, 0, name="gone")
    give(storage, 0)
    assert service_names(storage) == ["chat", "gone"]


# Webhooks


@pytest.fixture
def deployment() -> Iterator[LocalServer]:
    """A service that takes its target by webhook and acknowledges with what it was given."""

    def acknowledge(asked: Asked) -> Reply:
        body = json.loads(asked.body)
        return 200, json.dumps({"version": body["version"], "gpus": body["gpus"]}).encode()

    with local_server(acknowledge) as server:
        yield server


def posted(server: LocalServer) -> list[dict[str, Any]]:
    return [json.loads(asked.body) for asked in server.asked]


def test_an_acknowledged_webhook_clears_what_was_left_and_is_not_called_again(
    storage: Storage, deployment: LocalServer
) -> None:
    chat = service(webhook=f"{deployment.url}/target")
    give(storage, 0, 1, to=chat)
    give(storage, 0, to=chat)
    give(storage, 0, to=chat)
    assert [(body["version"], body["gpus"], body["leaving"]) for body in posted(deployment)] == [
        (1, {"node0": [0, 1]}, {}),
        (2, {"node0": [0]}, {"node0": [1]}),
    ]
    assert {(asked.method, asked.path) for asked in deployment.asked} == {("POST", "/target")}
    assert observed(storage, "chat") == Observed(2, {"node0": frozenset({0})})
    assert clear(storage, range(3)) == [1, 2]


def test_a_webhook_is_called_again_until_the_service_has_left(
    storage: Storage, deployment: LocalServer
) -> None:
    chat = service(webhook=deployment.url)
    give(storage, 0, 1, to=chat)
    quick = deployment.answer
    deployment.answer = lambda _: (200, b'{"version": 2, "gpus": {"node0": [0, 1]}}')
    give(storage, 0, to=chat)
    assert holds(storage) == [0, 1]
    deployment.answer = quick
    give(storage, 0, to=chat)
    assert holds(storage) == [0]


FAILURES: dict[str, tuple[int, str]] = {
    "an error": (500, "answered 500 Internal Server Error"),
    "not allowed": (403, "answered 403 Forbidden"),
    "moved": (302, "answered 302 Found"),
}


@pytest.mark.parametrize(("status", "said"), FAILURES.values(), ids=FAILURES.keys())
def test_a_webhook_that_fails_is_said_and_tried_again_and_the_target_stands(
    storage: Storage, deployment: LocalServer, status: int, said: str
) -> None:
    chat = service(webhook=f"{deployment.url}/?token=abc123")
    quick = deployment.answer
    deployment.answer = lambda _: (status, b'{"version": 1, "gpus": {}}')
    with pytest.raises(ServingError, match=said) as error:
        give(storage, 0, to=chat)
    assert "chat: target 1" in str(error.value)
    assert "abc123" not in str(error.value)
    assert target(storage, "chat").gpus == {"node0": {0}}
    assert observed(storage, "chat") == NOTHING_OBSERVED
    deployment.answer = quick
    assert give(storage, 0, to=chat) == 1
    assert observed(storage, "chat").version == 1


def test_a_webhook_that_nobody_answers_is_one_clear_line(storage: Storage) -> None:
    with local_server(lambda _: (200, b"")) as server:
        gone = server.url
    with pytest.raises(ServingError, match=f"^chat: target 1 could not be posted: {gone}") as error:
        give(storage, 0, to=service(webhook=gone))
    assert "\n" not in str(error.value)
    assert target(storage, "chat").version == 1


NO_ACKNOWLEDGEMENTS = {
    "empty": b"",
    "words": b"ok",
    "a list": b"[]",
    "a version alone": b'{"version": 2}',
    "gpus that are none": b'{"version": 2, "gpus": {"node0": "all"}}',
    "an older version": b'{"version": 0, "gpus": {}}',
    "a version not yet given": b'{"version": 3, "gpus": {}}',
}


@pytest.mark.parametrize("body", NO_ACKNOWLEDGEMENTS.values(), ids=NO_ACKNOWLEDGEMENTS.keys())
def test_an_answer_that_acknowledges_nothing_leaves_what_was_observed(
    storage: Storage, deployment: LocalServer, body: bytes
) -> None:
    chat = service(webhook=deployment.url)
    give(storage, 0, 1, to=chat)
    before = observed(storage, "chat")
    deployment.answer = lambda _: (200, body)
    give(storage, 0, to=chat)
    assert observed(storage, "chat") == before
    assert holds(storage) == [0, 1]


def test_people_are_told_of_a_service_that_does_not_leave(storage: Storage) -> None:
    publish_target(storage, "chat", {"node0": [0, 1]}, NOW)
    write_observed(storage, "chat", NOW, Observed(1, {"node0": frozenset({0, 1})}))
    assert slow_to_leave(storage, "chat", NOW + timedelta(hours=1)) is None
    publish_target(storage, "chat", {"node0": [0]}, NOW)
    assert slow_to_leave(storage, "chat", NOW + timedelta(minutes=9)) is None
    said = slow_to_leave(storage, "chat", NOW + timedelta(minutes=31))
    assert said is not None and "has not left node0 GPU 1 in 31 min" in said
    write_observed(storage, "chat", NOW, Observed(2, {"node0": frozenset({0, 1})}))  # it heard, and stays
    assert slow_to_leave(storage, "chat", NOW + timedelta(minutes=31))
    write_observed(storage, "chat", NOW, Observed(2, {"node0": frozenset({0})}))
    assert slow_to_leave(storage, "chat", NOW + timedelta(minutes=31)) is None
    assert slow_to_leave(storage, "nobody", NOW) is None
