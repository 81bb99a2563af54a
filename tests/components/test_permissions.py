"""The rights of each role, on a real NATS server and a real etcd."""

import ast
import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from nats.aio.client import Client

from components.discovery.etcd import etcd_client
from components.errors import BackendUnavailable
from components.permissions import (
    ADMINISTRATOR,
    LINES,
    ROLES,
    SERVING,
    EtcdRight,
    answer_subject,
    etcd_rights,
    nats_rights,
    users_of,
)
from services.local.accounts import Accounts
from services.local.servers import ETCD, NATS, Server, running
from tests.waiting import PATIENCE_S

REPO: Final = Path(__file__).resolve().parents[2]
NAMESPACE: Final = "mesh"
USERS: Final = {
    **{role: role for role in ROLES if role != "frontend"},
    "frontend-0": "frontend",
    "frontend-1": "frontend",
}
# Parts of subjects that are not verbs of an instance.
NO_VERBS: Final = {"decode", "prefill", "bootstrap", "planner", "local", "records"}


class Peer:
    """A user of NATS that records refusals."""

    def __init__(self) -> None:
        self.client = Client()
        self.errors: list[str] = []

    async def _error(self, error: Exception) -> None:
        self.errors.append(str(error))

    async def connect(self, url: str, user: str) -> None:
        await self.client.connect(url, error_cb=self._error, inbox_prefix=f"_INBOX.{NAMESPACE}.{user}")

    async def flush(self) -> None:
        """Wait until NATS has processed everything; nats-py sends the first ping before queued messages."""
        await self.client.flush()
        await self.client.flush()

    async def refusals(self) -> list[str]:
        """Return the refusals since the last call. The answer to a ping follows all errors."""
        await self.flush()
        found, self.errors = self.errors, []
        return [re.sub(r".*violation for (\w+).*?\"(.*)\".*", r"\1 \2", error.lower()) for error in found]


@pytest.fixture(scope="module")
async def nats(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """One server for the file: subscriptions end with the connections that a test closes."""
    async with running(NATS, tmp_path_factory.mktemp("nats"), accounts=Accounts.make(NAMESPACE, 2)) as server:
        yield server


@pytest.fixture
async def peers(nats: Server) -> AsyncIterator[dict[str, Peer]]:
    found = {user: Peer() for user in (*USERS, ADMINISTRATOR)}
    for user, peer in found.items():
        await peer.connect(nats.url_of(user), user)
    try:
        yield found
    finally:
        for peer in found.values():
            await peer.client.close()


def every_subject() -> Iterator[str]:
    """Yield a subject of each kind that any role may use."""
    for user, role in USERS.items():
        for subject in (part for rights in nats_rights(NAMESPACE, role, user) for part in rights):
            yield subject.replace(".>", ".a.b").replace("*", "x")


def covers(pattern: str, subject: str) -> bool:
    parts = {"*": "[^.]+", ">": ".+"}
    return (
        re.fullmatch(r"\.".join(parts.get(part, re.escape(part)) for part in pattern.split(".")), subject) is not None
    )


@pytest.mark.mesh
@pytest.mark.anyio
async def test_each_role_may_use_its_own_subjects_and_no_others(peers: dict[str, Peer]) -> None:
    """For each role and each subject of the mesh."""
    subjects = sorted(set(every_subject()))
    for user, role in USERS.items():
        peer, rights = peers[user], nats_rights(NAMESPACE, role, user)
        for subject in subjects:
            await peer.client.publish(subject)
        allowed = {s for s in subjects if any(covers(p, s) for p in rights.publish)}
        refused = {f"publish to {s}".lower().replace("to ", "") for s in subjects if s not in allowed}
        assert set(await peer.refusals()) == refused, user
        for subject in subjects:
            await peer.client.subscribe(subject)
        allowed = {s for s in subjects if any(covers(p, s) for p in rights.subscribe)}
        assert set(await peer.refusals()) == {f"subscription {s.lower()}" for s in subjects if s not in allowed}, user


@pytest.mark.mesh
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("frontend-0", "mesh.>"),
        ("frontend-0", "mesh.tokens.>"),
        ("frontend-0", "mesh.tokens.frontend-1.*"),
        ("frontend-0", "_INBOX.>"),
        ("frontend-0", "_INBOX.mesh.frontend-1.>"),
        ("frontend-0", "mesh.decode.*.generate"),
        ("decode", "mesh.prefill.*.prefill"),
        ("decode", "mesh.bootstrap.*.open"),
        ("decode", "mesh.frontend.*.present"),
        ("prefill", "mesh.decode.*.generate"),
        ("bootstrap", "mesh.prefill.*.prefill"),
        ("planner", "mesh.local.*.scale"),
        ("inspect", "mesh.decode.*.generate"),
        ("inspect", "$SYS.>"),
        ("planner", "mesh.responses.records.>"),
        ("planner", "mesh.decode.*.generate"),
        ("bootstrap", "mesh.tokens.>"),
        ("local", "mesh.decode.*.generate"),
    ],
)
async def test_what_a_role_may_not_read(nats: Server, user: str, subject: str) -> None:
    peer = Peer()
    await peer.connect(nats.url_of(user), user)
    await peer.client.subscribe(subject)
    assert await peer.refusals() == [f"subscription {subject.lower()}"]
    await peer.client.close()


@pytest.mark.mesh
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("decode", "mesh.prefill.p1.pages"),  # only bootstrap offers pages
        ("frontend-0", "mesh.prefill.p1.pages"),
        ("frontend-0", "mesh.bootstrap.b1.open"),
        ("frontend-0", "mesh.prefill.p1.prefill"),
        ("frontend-0", "mesh.decode.d1.heartbeat"),
        ("prefill", "mesh.decode.d1.heartbeat"),
        ("prefill", "mesh.tokens.frontend-0.f1"),
        ("prefill", "mesh.bootstrap.b1.open"),
        ("bootstrap", "mesh.decode.d1.generate"),
        ("local", "mesh.decode.d1.generate"),
        ("decode", "_INBOX.mesh.frontend-0.abc.1"),  # an answer to a call that it did not receive
        ("prefill", "_INBOX.mesh.frontend-0.abc.decode.d1.1"),
        ("bootstrap", "_INBOX.mesh.decode.abc.prefill.p1.1"),
        ("decode", "_INBOX.other.frontend-0.abc.decode.d1.1"),
        ("decode", "mesh.local.l1.scale"),
        ("inspect", "mesh.local.l1.scale"),
        ("inspect", "mesh.decode.d1.generate"),
        ("planner", "mesh.decode.d1.generate"),
        ("decode", "$JS.API.STREAM.DELETE.mesh-responses"),
        ("decode", "$JS.API.DIRECT.GET.mesh-responses.mesh.responses.records.resp_1"),
        ("frontend-0", "$JS.API.STREAM.DELETE.mesh-responses"),
        # its configuration may name any subject to read and to write
        ("frontend-0", "$JS.API.STREAM.CREATE.mesh-responses"),
        ("frontend-0", "$JS.API.STREAM.UPDATE.mesh-responses"),
        # NATS would send a record as it is to any subject, as the answer
        ("frontend-0", "$JS.API.DIRECT.GET.mesh-responses.mesh.responses.records.resp_1"),
    ],
)
async def test_what_a_role_may_not_send(nats: Server, user: str, subject: str) -> None:
    peer = Peer()
    await peer.connect(nats.url_of(user), user)
    await peer.client.publish(subject, b"x")
    assert await peer.refusals() == [f"publish {subject.lower()}"]
    await peer.client.close()


@pytest.mark.mesh
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("user", "target"),
    [
        ("frontend-0", "mesh.decode.d1.control"),
        ("decode", "mesh.prefill.p1.pages"),
        ("decode", "$JS.API.STREAM.CREATE.x"),
        ("prefill", "mesh.tokens.frontend-0.7"),
        ("bootstrap", "mesh.decode.d1.generate"),
    ],
)
async def test_a_user_that_calls_itself_gains_no_subject(nats: Server, user: str, target: str) -> None:
    """NATS let the receiver of a call publish to its reply subject, which may be any subject."""
    peer = Peer()
    await peer.connect(nats.url_of(user), user)
    own = f"mesh.{user.partition('-')[0]}.zz.present"
    await peer.client.subscribe(own)
    await peer.client.publish(own, b"", reply=target)
    assert await peer.refusals() == [], "it may send this message, and receive it"
    await peer.client.publish(target, b"forged")
    assert await peer.refusals() == [f"publish {target.lower()}"]
    await peer.client.close()


@pytest.mark.mesh
@pytest.mark.anyio
async def test_what_a_stolen_credential_can_do(peers: dict[str, Peer]) -> None:
    """docs/security.md must not promise more."""
    sends = {
        "frontend-0": [
            "mesh.decode.d1.generate",
            "mesh.decode.d1.cancel",
            "mesh.local.l1.kill",
            "mesh.responses.records.r",
            "$JS.API.STREAM.MSG.GET.mesh-responses",
            "$JS.API.STREAM.PURGE.mesh-responses",
        ],
        "decode": [
            "mesh.tokens.frontend-0.f1",
            "mesh.decode.d2.heartbeat",
            "mesh.prefill.p1.prefill",
            "mesh.bootstrap.b1.open",
        ],
        "prefill": ["mesh.prefill.p2.heartbeat", "mesh.decode.d1.room_failed"],
        "bootstrap": ["mesh.prefill.p1.pages"],
        "planner": ["mesh.local.l1.scale"],
        "inspect": ["mesh.decode.d1.profile", "mesh.decode.d1.control", "mesh.frontend.f1.explain_route", "$SRV.STATS"],
    }
    reads = {
        "decode": ["mesh.decode.*.generate"],
        "prefill": ["mesh.prefill.*.prefill"],
        "bootstrap": ["mesh.bootstrap.*.open"],
        "planner": ["mesh.decode.*.heartbeat", "mesh.prefill.*.heartbeat"],
        "local": ["mesh.local.*.scale"],
    }
    for user in USERS:
        for subject in sends.get(user, ()):
            await peers[user].client.publish(subject)
        for subject in reads.get(user, ()):
            await peers[user].client.subscribe(subject)
        assert await peers[user].refusals() == [], user


@pytest.mark.mesh
@pytest.mark.anyio
async def test_only_the_role_that_is_called_can_answer(peers: dict[str, Peer]) -> None:
    frontend, decode = peers["frontend-0"], peers["decode"]
    reply = answer_subject(frontend.client.new_inbox(), "mesh.decode.d1.generate", 1)
    answers = await frontend.client.subscribe(reply)
    calls = await decode.client.subscribe("mesh.decode.d1.generate")
    await decode.flush()
    await frontend.client.publish("mesh.decode.d1.generate", b"call", reply=reply)
    call = await calls.next_msg(timeout=PATIENCE_S)
    await call.respond(b"answer")
    assert (await answers.next_msg(timeout=PATIENCE_S)).data == b"answer"
    for user, role in USERS.items():
        if role != "decode":
            await peers[user].client.publish(reply, b"forged")
            assert await peers[user].refusals() == [f"publish {reply.lower()}"], user


@pytest.mark.mesh
@pytest.mark.anyio
async def test_the_administrators_programs_get_answers_in_their_inbox(peers: dict[str, Peer]) -> None:
    """The nats command chooses its own subjects below a prefix."""
    root = peers[ADMINISTRATOR]
    answers = await root.client.subscribe(root.client.new_inbox() + ".*")
    await root.flush()
    serving = [user for user, role in USERS.items() if role in SERVING.split()]
    for user in serving:
        await peers[user].client.publish(answers.subject.replace("*", user), b"answer")
        assert await peers[user].refusals() == []
    assert {(await answers.next_msg(timeout=PATIENCE_S)).subject.rpartition(".")[2] for _ in serving} == set(serving)


def verbs_in_code() -> set[str]:
    """Return the verbs that processes serve or publish."""
    found: set[str] = set()
    for path in (*(REPO / "components").rglob("*.py"), *(REPO / "services").rglob("*.py")):
        text = path.read_text()
        found |= set(re.findall(r"\bEndpoint\(\s*\"(\w+)\"", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.JoinedStr):
                last = node.values[-1]
                before = node.values[-2] if len(node.values) > 1 else None
                if isinstance(last, ast.Constant) and isinstance(before, ast.FormattedValue):
                    is_subject = "subject" in ast.unparse(before) or "of_role" in ast.unparse(before)
                    if is_subject and (verb := re.fullmatch(r"\.(\w+)", str(last.value))):
                        found.add(verb[1])
    return found - NO_VERBS


def test_each_call_and_message_in_the_code_has_a_line() -> None:
    """NATS refuses a call without one, and its caller waits for its time limit."""
    listed = {line.subject.rpartition(".")[2] for line in LINES}
    assert len(verbs_in_code()) > 20
    assert verbs_in_code() <= listed


@pytest.mark.mesh
@pytest.mark.anyio
async def test_etcd_lets_each_role_write_its_own_records_and_read_all(tmp_path: Path) -> None:
    async with running(ETCD, tmp_path, accounts=Accounts.make(NAMESPACE, 1)) as server:
        keys = [f"{NAMESPACE}/instances/{role}/x" for role in ("frontend", "decode", "prefill", "bootstrap")]
        keys += [f"{NAMESPACE}/planner", "other/instances/decode/x"]
        for user in (user for user in USERS if user != "frontend-1"):
            rights = etcd_rights(NAMESPACE, USERS[user])
            may = await asyncio.to_thread(asked, server.url_of(user), keys)
            assert may == {key: wanted(key, rights) for key in keys}, user


def wanted(key: str, rights: list[EtcdRight]) -> tuple[bool, bool]:
    """Return whether the key may be read, and written."""
    of_key = [right for right in rights if key.startswith(right.prefix)]
    return bool(of_key), any(right.writes for right in of_key)


def asked(url: str, keys: list[str]) -> dict[str, tuple[bool, bool]]:
    def reads(key: str) -> bool:
        with etcd_client(url) as client:
            client.get(key)
        return True

    def writes(key: str) -> bool:
        with etcd_client(url) as client:
            client.put(key, "x")
        return True

    return {key: (allowed(reads, key), allowed(writes, key)) for key in keys}


def allowed(call: Callable[[str], bool], key: str) -> bool:
    try:
        return call(key)
    except BackendUnavailable as exc:
        return "permission denied" not in exc.message


def test_rights_name_no_other_mesh() -> None:
    """Any mesh of these servers may look for micro services, and gets answers to this from all of them."""
    own = (f"{NAMESPACE}.", f"_INBOX.{NAMESPACE}.", "$SRV.", "$JS.API.")
    searches = tuple(f"_INBOX.*.*.*.{verb}." for verb in ("PING", "INFO", "STATS"))
    for user, role in USERS.items():
        publish, subscribe = nats_rights(NAMESPACE, role, user)
        for subject in publish:
            assert subject.startswith((*own, *searches)), subject
            if subject.startswith("$JS.API."):  # INFO: streams and bytes of an account
                assert f".{NAMESPACE}-responses" in subject or (role, subject) == ("inspect", "$JS.API.INFO")
        for subject in subscribe:
            assert subject.startswith((f"{NAMESPACE}.", f"_INBOX.{NAMESPACE}.{user}.", "$SRV.")), subject


@pytest.mark.parametrize(
    ("users", "error"),
    [
        (["decode/host1", "prefill/host1"], "decode/host1 and prefill/host1 are both the user host1"),
        (["decode", "prefill/decode"], "decode and prefill/decode are both the user decode"),
        (["decode/root"], "root is the administrator's name"),
    ],
)
def test_a_name_that_two_users_would_share_is_refused(users: list[str], error: str) -> None:
    """Of instances named by their host only the last one was written, and the others had its rights."""
    with pytest.raises(SystemExit, match=error):
        users_of(users)
    assert users_of(["decode/d1", "prefill/p1", "planner"]) == {
        "d1": "decode/d1",
        "p1": "prefill/p1",
        "planner": "planner",
    }
