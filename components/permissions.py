"""What each role may publish and subscribe to in NATS, and read and write in etcd.

Each new call or message needs a line in `LINES`: a role has no other rights. `python -m components.permissions [NAMESPACE
[ROLE/INSTANCE …]]` prints NATS users by the common names of certificates: those of the roles, or of single instances.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from components.credentials import INBOX

ROLES: Final = ("frontend", "decode", "prefill", "bootstrap", "planner", "local", "inspect")
REGISTERED: Final = "frontend decode prefill bootstrap"  # in etcd
WORKERS: Final = "prefill decode"
INSTANCE: Final = re.compile(r"[a-z]+(/[a-z0-9-]+)?")
ADMINISTRATOR: Final = "root"  # a user of etcd and NATS; etcd requires this name
SERVING: Final = "frontend decode prefill bootstrap planner local"  # as NATS micro services


class Line(NamedTuple):
    """Subjects, without the namespace, that `senders` publish to and `receivers` subscribe to."""

    subject: str
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    is_news: bool = False  # the sender's own subject; else the receiver's


def call(verb: str, of: str, by: str) -> Iterator[Line]:
    """Calls on `<namespace>.<role>.<instance>.<verb>`, answered on `answer_subject`."""
    for role in of.split():
        yield Line(f"{role}.*.{verb}", tuple(by.split()), (role,))


def news(verb: str, of: str, to: str) -> Iterator[Line]:
    """Messages of instances on their own subjects."""
    for role in of.split():
        yield Line(f"{role}.*.{verb}", (role,), tuple(to.split()), is_news=True)


LINES: Final = (
    *call("generate", of="decode", by="frontend"),
    *call("cancel", of="decode", by="frontend"),
    *call("resend", of="decode", by="frontend"),
    *call("embed", of="decode", by="frontend"),
    *call("cancel_embed", of="decode", by="frontend"),
    *call("cancel_response", of="frontend", by="frontend"),
    Line("tokens.{name}.*", ("decode",), ("frontend",)),
    # a transfer: only bootstrap passes offers of pages to prefill
    *call("prefill", of="prefill", by="decode"),
    *call("quiesce", of="prefill", by="decode"),
    *call("open", of="bootstrap", by="decode"),
    *call("pages", of="prefill", by="bootstrap"),
    *call("close", of="bootstrap", by="prefill"),
    *call("kv_coming", of="decode", by="prefill"),
    *call("room_failed", of="decode", by="prefill bootstrap"),
    *news("heartbeat", of="decode", to="frontend planner inspect"),
    *news("heartbeat", of="prefill", to="decode planner inspect"),
    *news("kv_events", of="decode", to="frontend"),
    *news("kv_events", of="prefill", to="decode"),
    *call("kv_dump", of="decode", by="frontend inspect"),
    *call("kv_dump", of="prefill", by="decode inspect"),
    *call("ask_heartbeat", of="decode", by="frontend"),
    *call("ask_heartbeat", of="prefill", by="decode"),
    Line("decode.ask_heartbeat", ("frontend", "inspect"), ("decode",)),
    Line("prefill.ask_heartbeat", ("frontend", "inspect"), ("prefill",)),
    *call("present", of=REGISTERED, by=REGISTERED),
    # operation
    *call("explain_route", of="frontend decode", by="inspect"),
    *call("profile", of=WORKERS, by="inspect"),
    *call("profile_part", of=WORKERS, by="inspect"),
    *call("status", of="frontend decode prefill bootstrap planner", by="frontend inspect"),
    *call("control", of="frontend decode prefill bootstrap planner", by="inspect"),
    *call("load", of="frontend", by="frontend"),
    *call("kill", of="local", by="frontend"),  # from /ui; services.local refuses all but its own workers
    Line("traces.keep", ("frontend",), ("frontend", "decode", "prefill", "bootstrap")),
    *call("plan", of="planner", by="inspect"),
    *call("count", of="local", by="planner"),
    *call("scale", of="local", by="planner"),
)
# searches of a role for micro services, after `$SRV.`
SEARCHES: Final = {
    "inspect": ("PING", "PING.*", "INFO", "INFO.*", "STATS", "STATS.*"),
    "planner": ("PING.kvmesh-local",),
}


def answer_subject(inbox: str, subject: str, number: int | str) -> str:
    """The reply subject of a call on `subject`.

    It names the called instance, so that others may not answer. NATS's own `allow_responses` gives more: a user that may call
    itself could choose any subject for the answer, and publish there.
    """
    return ".".join((inbox, *subject.split(".")[1:3], str(number)))


class NatsRights(NamedTuple):
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


class User(NamedTuple):
    """A user of NATS. `name` is its processes' MESH_NATS_NAME, by default their role."""

    name: str
    role: str
    proof: str  # of nats.conf: `user: "decode", password: "…"`, `nkey: U…`, `user: "CN=decode"`
    instance: str = ""  # MESH_INSTANCE_ID of its only process; empty: any


def nats_rights(namespace: str, role: str, name: str, instance: str = "") -> NatsRights:
    """The rights of a role; `name` is the user's.

    A user of one `instance` can neither read the subjects of others of its role, nor publish as one of them.
    """

    def own(line: Line, *, is_mine: bool) -> str:
        mine = f"{role}.{instance}." if instance and is_mine else f"{role}.*."
        return line.subject.replace(f"{role}.*.", mine)

    publish = [own(x, is_mine=x.is_news).replace("{name}", "*") for x in LINES if role in x.senders]
    publish = [f"{namespace}.{subject}" for subject in publish]
    publish += [f"$SRV.{search}" for search in SEARCHES.get(role, ())]
    subscribe = [own(x, is_mine=not x.is_news).replace("{name}", name) for x in LINES if role in x.receivers]
    subscribe = [f"{namespace}.{subject}" for subject in subscribe]
    if role in SERVING.split():
        service = f"kvmesh-{role}"
        searches = [
            f"$SRV.{verb}{of}" for verb in ("PING", "INFO", "STATS") for of in ("", f".{service}", f".{service}.*")
        ]
        calls = [subject for subject in subscribe if subject.startswith(f"{namespace}.{role}.")]
        subscribe += searches
        # parts of an inbox: a mesh, a user, a random one; any mesh may search
        publish += [answer_subject(f"{INBOX}.{namespace}.*.*", subject, "*") for subject in calls]
        publish += [answer_subject(f"{INBOX}.*.*.*", subject, "*") for subject in searches]
        publish.append(f"{INBOX}.{namespace}.{ADMINISTRATOR}.>")  # programs such as the nats command
    subscribe.append(f"{INBOX}.{namespace}.{name}.>")
    if role == "frontend":
        publish += _stored_responses(namespace)
    if role == "inspect":
        publish += ["$JS.API.INFO", f"$JS.API.STREAM.INFO.{_response_stream(namespace)}"]
    return NatsRights(tuple(dict.fromkeys(publish)), tuple(dict.fromkeys(subscribe)))


def _stored_responses(namespace: str) -> list[str]:
    # Not CREATE or UPDATE: a stream may read and write any subject of these servers. Not DIRECT.GET: its answer is a raw
    # record, on any subject that the caller names; that of MSG.GET is JSON, which no process accepts.
    calls = ("STREAM.INFO", "STREAM.MSG.GET", "STREAM.PURGE")
    stream = _response_stream(namespace)
    return [f"{namespace}.responses.records.*", *(f"$JS.API.{call}.{stream}" for call in calls)]


def _response_stream(namespace: str) -> str:
    # A wildcard stands for a whole part: the mesh `*` is any mesh of these servers.
    return "*" if namespace == "*" else f"{namespace}-responses"


def nats_users(namespace: str, users: Sequence[User], administrator: str) -> str:
    """The `authorization` block of a nats.conf. `administrator`: proof of a user with all rights."""
    lines = ["authorization {", "  users: ["]
    if administrator:
        lines.append(f"    {{ {administrator} }}")
    for user in users:
        rights = nats_rights(namespace, user.role, user.name, user.instance)
        lines += [
            f"    {{ {user.proof}, permissions: {{  # {user.role}",
            f"      publish: {{ allow: {json.dumps(rights.publish)} }}",
            f"      subscribe: {{ allow: {json.dumps(rights.subscribe)} }}",
            "    } }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


class EtcdRight(NamedTuple):
    writes: bool  # else it only reads
    prefix: str
    is_key: bool = False  # this key alone


def etcd_rights(namespace: str, role: str, instance: str = "") -> list[EtcdRight]:
    """A role's keys: its own records, or that of one instance, and all records to read."""
    instances, planner = f"{namespace}/instances/", f"{namespace}/planner"
    if role == "local":  # removes the records of its dead children
        return [EtcdRight(writes=True, prefix=instances)]
    rights = [EtcdRight(writes=False, prefix=instances)]
    if role in REGISTERED.split():
        rights.append(EtcdRight(writes=True, prefix=f"{instances}{role}/{instance}", is_key=bool(instance)))
    if role in ("planner", "inspect"):
        rights.append(EtcdRight(writes=role == "planner", prefix=planner))
    if role == "inspect":  # `doctor` tries whether etcd can be written
        rights.append(EtcdRight(writes=True, prefix=f"{namespace}/doctor"))
    return rights


def users_of(arguments: Sequence[str]) -> dict[str, str]:
    """Users by name: for `decode/d1 …`, else one for each role. Their values are a role, or a role and an instance."""
    if not arguments:
        return {role: role for role in ROLES}
    users: dict[str, str] = {}
    for argument in arguments:
        if not INSTANCE.fullmatch(argument) or argument.partition("/")[0] not in ROLES:
            sys.exit(f"{argument}: give ROLE or ROLE/INSTANCE, such as decode/d1; the roles are {', '.join(ROLES)}")
        name = argument.rpartition("/")[2]
        if name == ADMINISTRATOR:
            sys.exit(f"{argument}: {ADMINISTRATOR} is the administrator's name; give this instance another one")
        if name in users:
            sys.exit(f"{users[name]} and {argument} are both the user {name}: give each instance a name of its own")
        users[name] = argument
    return users


def certified_users(namespace: str, users: Mapping[str, str] | None = None) -> str:
    """Users by their certificates, for a nats.conf with `verify_and_map`; by default one for each role."""
    found = users_of(()) if users is None else users
    rights = [User(name, *_parted(of, f'user: "CN={name}"')) for name, of in found.items()]
    return nats_users(namespace, rights, f'user: "CN={ADMINISTRATOR}"')


def _parted(of: str, proof: str) -> tuple[str, str, str]:
    role, _, instance = of.partition("/")
    return role, proof, instance


if __name__ == "__main__":
    sys.stdout.write(
        certified_users(sys.argv[1] if len(sys.argv) > 1 else "kvmesh", users_of(sys.argv[2:])),
    )
