"""Authentication: if API keys are set, every request needs one, except on a few open paths.

A path is open only if the string that routes are matched against equals it, so no other spelling, Host header or method gets
past the check. Unknown paths need a key, too. Without API keys, requests are checked by Host and Origin instead
(`services.frontend.sites`).
"""

import re
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from components.errors import KeyLimited, Rejected
from components.openai.errors import ApiError, from_mesh, from_status
from services.frontend.admission import Admission, queue_key
from services.frontend.answer_form import Forms, form_at
from services.frontend.fair_queue import AdmissionTicket
from services.frontend.keys import KeyRing
from services.frontend.metrics import FrontendMetrics
from services.frontend.operations import Operations
from services.frontend.quota import Account
from services.frontend.request_lines import RequestLines
from services.frontend.sites import Sites
from services.frontend.ui.page import PATHS, ROOT

# For load balancers, which without a key get the status only; and the static files of /ui, without its API.
OPEN_PATHS: Final = frozenset({"/", "/health", "/live", "/ready"}) | PATHS  # "/" sends a browser to the page
CALLER: Final = "kvmesh.caller"  # key of a Caller in an ASGI scope
ROUTE_CHARS: Final = 128  # of a refused request's path in the log, because any client can choose it
LABEL: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")  # a client's X-Request-Id
BEARER: Final = {"www-authenticate": "Bearer"}
MISSING_KEY_ERROR: Final = from_status(401, headers=BEARER)
WRONG_KEY_ERROR: Final = from_status(401, "Incorrect API key provided.", BEARER)
DRAINING_ERROR: Final = ApiError(
    503,
    "This frontend takes no new requests, because an operator is draining it. Send the request to another one, or retry later.",
    "service_unavailable_error",
    code="draining",
    retry_after_s=1.0,
    own_headers={"connection": "close"},
)
SEVERAL_KEYS_ERROR: Final = from_status(
    400, "Send one API key: one 'Authorization' header, one 'x-api-key', or the same key in both."
)


@dataclass(frozen=True, slots=True)
class Caller:
    label: str = ""  # the client's X-Request-Id if valid; for display only, never used as a key
    credential: bytes = b""  # key or Authorization header; distinguishes clients if no API keys are set
    account: Account | None = None  # None without API keys
    lacks_valid_key: bool = False  # without a valid API key although keys are set; only on open paths

    @property
    def sees_tenant(self) -> str | None:
        """The tenant whose requests this client may see; None: all requests."""
        return None if self.account is None or self.account.is_operator else self.account.tenant

    @property
    def queue_key(self) -> bytes:
        """The fair queue's key: requests with equal keys share a line."""
        return queue_key(self.credential) if self.account is None else self.account.name.encode()

    @property
    def owner(self) -> bytes:
        """The owner of stored responses: the key's name, which outlives the key itself, or without keys what was sent."""
        return self.credential if self.account is None else self.account.name.encode()

    def cache_salt(self, asked: str | None, *, shared: bool) -> str:
        """Return a request's cache salt. Unless `shared`, each tenant has its own prefix cache.

        A tenant's name contains no slash, so salts of different tenants never collide.
        """
        if self.account is None or shared:
            return asked or ""
        return f"{self.account.tenant}/{asked or ''}"

    def priority(self, asked: int | None, best: int) -> int:
        """Return a request's priority; lower is served first. `best` is the limit for keys that have none of their own.

        Raises: Rejected.
        """
        if self.account is not None and self.account.limits.best_priority is not None:
            best = self.account.limits.best_priority
        if asked is not None and asked < best:
            raise Rejected(
                f"Invalid 'priority': {asked} is better than your limit, {best}; lower is served first.",
                param="priority",
                code="invalid_value",
            )
        return max(asked or 0, best)

    def enter(
        self,
        admission: Admission,
        metrics: FrontendMetrics,
        *,
        priority: int,
        prompt_tokens: int,
        choices: int,
    ) -> AdmissionTicket:
        """Enter the admission queue, and charge the prompt to the API key. A refused request is not charged.

        Raises: KeyLimited, QueueFull.
        """
        account = self.account
        if account is not None:
            try:
                account.check_prompt(prompt_tokens)
            except KeyLimited:
                metrics.limited.labels(account.name).inc()
                raise
        ticket = admission.enter(self.queue_key, priority, prompt_tokens, choices)
        if account is not None:
            account.take(prompt_tokens)
        return ticket

    def leave(
        self, admission: Admission, ticket: AdmissionTicket, *, prompt_tokens: int, answer_tokens: int = 0
    ) -> None:
        """Leave admission. The tokens of a prompt that was never admitted are given back to the API key."""
        if self.account is not None and not ticket.is_admitted:
            self.account.take(-prompt_tokens)
        admission.leave(ticket, answer_tokens)


UNKNOWN_CALLER: Final = Caller()


def caller_of(scope: Scope) -> Caller:
    """Return the client of a request; UNKNOWN_CALLER if the application has no gate."""
    caller: Caller = scope.get(CALLER, UNKNOWN_CALLER)
    return caller


class Gate:
    """ASGI middleware; it reads each request's headers once."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        ring: KeyRing | None,
        metrics: FrontendMetrics,
        sites: Sites,
        forms: Forms,
        operations: Operations,
        lines: RequestLines,
    ) -> None:
        """`sites` checks requests if there is no `ring`.

        Requests that need the model are refused while `operations` says that an operator is draining this frontend.
        """
        self._operations = operations
        self._lines = lines
        self._forms = forms
        self._app = app
        self._ring = ring
        self._metrics = metrics
        self._sites = sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or answer 400, 401, 403, 429 or 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        credentials = read_credentials(scope["headers"])
        caller = self._check(scope, credentials)
        if isinstance(caller, ApiError):
            await self._refuse(caller, credentials.label, scope, receive, send)
            return
        scope[CALLER] = caller
        if caller.account is not None and _asks_for_work(scope):
            await self._limited(caller.account, credentials.label, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope, credentials: "Credentials") -> Caller | ApiError:
        ring, key = self._ring, credentials.key
        is_open = scope["path"] in OPEN_PATHS and scope["method"] in {"GET", "HEAD"}
        if not is_open:
            if credentials.several:
                return SEVERAL_KEYS_ERROR
            if ring is None and (error := self._sites.refusal(scope["headers"])) is not None:
                return error
        if self._operations.order.draining and _asks_for_work(scope):
            self._metrics.refused.labels("draining").inc()
            return DRAINING_ERROR
        if ring is None:
            return Caller(credentials.label, credentials.credential)
        account = None if key is None else ring.find(key)
        if account is None and not (is_open and key is None):
            self._metrics.unauthorized.labels("missing" if key is None else "wrong").inc()
        if account is None and not is_open:
            return WRONG_KEY_ERROR if key else MISSING_KEY_ERROR
        return Caller(credentials.label, credentials.credential, account, lacks_valid_key=account is None)

    async def _limited(self, account: Account, label: str, scope: Scope, receive: Receive, send: Send) -> None:
        send = _with_headers(account, send) if account.limits.per_minute else send
        try:
            account.enter()
        except KeyLimited as exc:
            self._metrics.limited.labels(account.name).inc()
            await self._refuse(from_mesh(exc, request_id=""), label, scope, receive, send, api_key=account.name)
            return
        self._metrics.key_requests.labels(account.name).inc()
        try:
            await self._app(scope, receive, send)
        finally:
            account.leave()

    async def _refuse(
        self, error: ApiError, label: str, scope: Scope, receive: Receive, send: Send, *, api_key: str = ""
    ) -> None:
        """`api_key`: its name."""
        request_id = uuid4().hex
        answer = form_at(self._forms, scope["path"])(request_id).failure(error, label or request_id)
        route, status = scope["path"][:ROUTE_CHARS], answer.status_code
        self._lines.refused(route, status, error.message, request_id=request_id, label=label, api_key=api_key)
        await answer(scope, receive, send)


def _asks_for_work(scope: Scope) -> bool:
    """Return whether this is a new request, not a call of the page at /ui or the cancellation of a response."""
    path: str = scope["path"]
    return scope["method"] == "POST" and not path.startswith(f"{ROOT}/") and not path.endswith("/cancel")


class Credentials(NamedTuple):
    key: bytes | None  # from Authorization or x-api-key
    label: str
    several: bool  # more than one key: refused, because it is unclear which one is meant
    credential: bytes  # the key, or an Authorization header of another kind


def read_credentials(headers: Iterable[tuple[bytes, bytes]]) -> Credentials:
    bearer = own = None
    other, label = b"", ""
    several = False
    for name, value in headers:
        if name == b"authorization":
            kind, _, token = value.strip().partition(b" ")
            several = several or bearer is not None
            if kind.lower() == b"bearer":
                bearer = token.strip()
            else:
                bearer, other = b"", value.strip()
        elif name == b"x-api-key":
            several = several or own is not None
            own = value.strip()
        elif name == b"x-request-id" and LABEL.fullmatch(value):
            label = value.decode()
    several = several or bool(bearer and own and bearer != own)
    key = bearer or own or bearer
    return Credentials(key, label, several, key or other)


def _with_headers(account: Account, send: Send) -> Send:
    """Return `send` with rate-limit headers added to the answer."""

    def send_with_headers(message: Message) -> Awaitable[None]:  # not a coroutine, because it runs for each token
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *account.headers()]
        return send(message)

    return send_with_headers
