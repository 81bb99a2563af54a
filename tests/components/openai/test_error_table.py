import json

import pytest

from components import errors as mesh_errors
from components.errors import BY_NAME, MeshError, NoDecodeInstance, QueueFull, Rejected
from components.openai.errors import TABLE, WHY_NO_KV, ApiError, from_mesh, from_status, internal


def test_every_class_of_our_errors_has_a_row() -> None:
    assert set(TABLE) == set(BY_NAME.values())


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("Rejected", 400, None),
        ("PromptTooLong", 400, "context_length_exceeded"),
        ("UnknownModel", 404, "model_not_found"),
        ("MessageTooLarge", 413, "request_too_large"),
        ("QueueFull", 429, "rate_limit_exceeded"),
        ("Cancelled", 499, "request_cancelled"),
        ("InvariantBroken", 500, "internal_error"),
        ("PeerLost", 502, "instance_lost"),
        ("KvUnavailable", 502, "kv_transfer_failed"),
        ("NoDecodeInstance", 503, "no_instance"),
        ("BackendUnavailable", 503, "backend_unavailable"),
        ("DeadlineExceeded", 504, "deadline_exceeded"),
    ],
)
def test_the_error_that_a_client_gets(name: str, status: int, code: str | None) -> None:
    error = from_mesh(BY_NAME[name]("because"), "req1")
    assert (error.status, error.code) == (status, code)


@pytest.mark.parametrize("cls", [cls for cls in TABLE if not issubclass(cls, Rejected)])
def test_an_internal_error_reveals_nothing(cls: type[MeshError]) -> None:
    error = from_mesh(cls("nats://10.0.0.7:4222 refused"), "req1")
    assert "10.0.0.7" not in error.body().decode()
    assert error.status < 500 or "req1" in error.message


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        ("KvCorrupt", "it was corrupted on the way."),
        ("DeadlineExceeded", "it took too long."),
        ("PrefillLost", "the instance was lost."),
        ("ListenerGone", "the instance was lost."),  # it was killed before it got the offer of pages
        ("New", "the transfer failed."),
    ],
)
def test_a_failed_transfer_has_its_reason(cause: str, why: str) -> None:
    error = from_mesh(mesh_errors.KvUnavailable("page 7 on 10.0.0.7", cause=cause), "req1")
    assert error.message == f"The prompt's KV was not received from its prefill instance: {why} (request req1)"


def test_every_reason_without_kv_is_one_of_our_errors() -> None:
    assert set(WHY_NO_KV) <= set(BY_NAME)


def test_a_rejection_names_its_parameter() -> None:
    body = json.loads(from_mesh(Rejected("no", param="messages"), "req1").body())
    assert body == {"error": {"message": "no", "type": "invalid_request_error", "param": "messages", "code": None}}


def test_overload_has_a_retry_after() -> None:
    assert from_mesh(QueueFull("full", retry_after_s=2.2), "r").headers() == [(b"retry-after", b"3")]
    assert from_mesh(NoDecodeInstance("none", retry_after_s=0.1), "r").headers() == [(b"retry-after", b"1")]
    assert from_mesh(mesh_errors.PeerLost("gone"), "r").headers() == []


def test_an_error_class_of_a_newer_version_becomes_its_nearest_known_class() -> None:
    class NewKindOfLoss(mesh_errors.PrefillLost):
        pass

    assert from_mesh(NewKindOfLoss("x"), "r").status == 502


@pytest.mark.parametrize("error", [from_status(404), from_status(418), from_status(500), internal("r")])
def test_every_error_has_the_four_fields(error: ApiError) -> None:
    assert set(json.loads(error.body())["error"]) == {"message", "type", "param", "code"}
