"""A simulated fleet under load, with failing, joining and leaving workers."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from bench.simulate.clock import Clock
from bench.simulate.group import PHASES, Flow, Group
from bench.simulate.incidents import Incident, Role
from bench.simulate.measured import Measured, Share
from bench.simulate.routers import MakePolicy, Routers
from bench.simulate.setup import Setup
from bench.simulate.steps import Part, Stay
from bench.simulate.traffic import Request
from bench.simulate.worker import Engine, Worker
from components.routing.router import RouteChoice, Router

PLANNER_THINKS_S: Final = 300.0  # how long a fleet without workers waits for the planner


class Fleet:
    def __init__(
        self,
        setup: Setup,
        traffic: Iterable[Request],
        decode_policy: MakePolicy,
        prefill_policy: MakePolicy | None = None,
        incidents: Sequence[Incident] = (),
    ) -> None:
        self.clock = Clock()
        self.measured = Measured(setup.slo)
        self.in_flight = 0
        self._setup = setup
        self._traffic: Iterator[Request] = iter(traffic)
        self._more = True
        self._stranded: list[tuple[Request, int]] = []  # requests without a worker
        self._stranded_s = 0.0  # since when
        self.joining = sum(incident.kind == "add" for incident in incidents)  # expected workers
        self.is_planned = False  # whether the planner may add workers
        self._changed_s = 0.0
        self.decodes = self._group("decode", setup.engine, decode_policy, setup.decode_routers)
        prefills = setup.prefill_engine or setup.engine
        make = prefill_policy or decode_policy
        self.prefills = self._group("prefill", prefills, make, setup.prefill_routers)
        for group, count in ((self.decodes, setup.decode), (self.prefills, setup.prefill)):
            for _ in range(count):
                self.join(group)
            if count or any(i.kind == "add" and i.role == group.role for i in incidents):
                self._send_heartbeats((group, 0))
        for incident in incidents:
            self.clock.at(incident.at_s, self._apply, incident)

    def run(self, until_s: float = float("inf")) -> Measured:
        """Run to the last token, or until `until_s`."""
        started = time.process_time()
        self._next_arrival()
        self.clock.run(lambda: self._has_work() and self.clock.now_s < until_s)
        self._count(0)
        measured, now_s = self.measured, self.clock.now_s
        measured.unserved = len(self._stranded)
        measured.duration_s, measured.events = now_s, self.clock.events
        measured.cpu_s = time.process_time() - started
        for group in (self.prefills, self.decodes):
            for w in group.workers:
                alive_s = (now_s if w.until_s is None else w.until_s) - w.since_s
                devices = w.engine.devices
                measured.workers.append(Share(group.role, alive_s, w.busy_s, w.prompt_tokens, w.cached_tokens, devices))
        return measured

    def _has_work(self) -> bool:
        if self._more or self.in_flight > len(self._stranded):
            return True
        if not self._stranded:
            return False
        return self.joining > 0 or (self.is_planned and self.clock.now_s - self._stranded_s < PLANNER_THINKS_S)

    # Requests.

    def _next_arrival(self) -> None:
        request = next(self._traffic, None)
        if request is None:
            self._more = False
        else:
            self.clock.at(request.at_s, self._arrive, request)

    def _arrive(self, request: Request) -> None:
        self.measured.arrived += 1
        engine = self._setup.engine
        if -(-(request.prompt + request.output) // engine.page_tokens) > engine.num_pages:
            self.measured.refused += 1
        else:
            self._count(1)
            self._dispatch(request, 0)
        self._next_arrival()

    def _count(self, change: int) -> None:
        now_s = self.clock.now_s
        self.measured.in_flight_s += self.in_flight * (now_s - self._changed_s)
        self._changed_s = now_s
        self.in_flight += change

    def _dispatch(self, request: Request, generated: int) -> None:
        tokens, left = request.prompt + generated, request.output - generated
        pages = -(-(tokens + left) // self._setup.engine.page_tokens)
        frontend = self.decodes.routers.of(request.number)
        chosen = self._choose(self.decodes, frontend, request, tokens)
        if chosen is None:
            self._stranded.append((request, generated))
            self._stranded_s = self.clock.now_s
            return
        decode = self.decodes.by_name[chosen.instance_id]
        chooser = self.prefills.routers.of(self.decodes.numbers[decode])
        there = None
        if self.prefills.workers and tokens - decode.found(request, tokens) > self._setup.max_local_prefill:
            there = self._choose(self.prefills, chooser, request, tokens)
        route = frontend.send(chosen, 0 if there else tokens - chosen.cached_tokens, pages)
        route.accepted(self.decodes.accept(decode))
        part = Part.DECODE if there else Part.FULL
        stay = Stay(request, part, tokens, left - (part is Part.DECODE))
        flow = stay.flow = Flow(request, decode, stay, chooser, route)
        self.decodes.flows[decode][flow] = None
        if there is not None:
            self._send_prompt(flow, there)
        decode.submit(stay)

    def _send_prompt(self, flow: Flow, chosen: RouteChoice) -> None:
        tokens = flow.at_decode.tokens
        prefill = self.prefills.by_name[chosen.instance_id]
        pages = -(-tokens // prefill.engine.page_tokens)
        flow.to_prefill = flow.chooser.send(chosen, tokens - chosen.cached_tokens, pages)
        flow.to_prefill.accepted(self.prefills.accept(prefill))
        stay = Stay(flow.request, Part.PREFILL, tokens, 1)
        stay.flow, flow.prefill, flow.at_prefill = flow, prefill, stay
        self.prefills.flows[prefill][flow] = None
        prefill.submit(stay)

    def _choose(self, group: Group, router: Router, request: Request, tokens: int) -> RouteChoice | None:
        tried: list[str] = []
        while (chosen := group.routers.choose(router, request, tokens, tried)) is not None:
            name = chosen.instance_id
            if group.by_name[name].alive:
                return chosen
            tried.append(name)  # a sender detects a dead worker at once
            router.health.failed(name, self.clock.now_s)
        return None

    # Reports of workers.

    def reserved(self, worker: Worker, stay: Stay) -> None:
        flow = stay.flow
        flow.reserved_s = self.clock.now_s
        if flow.computed_s >= 0:
            self._transfer(flow)

    def computed(self, worker: Worker, stay: Stay) -> None:
        flow = stay.flow
        if stay.part is Part.FULL:
            self._first_token(flow)
            return
        flow.computed_s = self.clock.now_s
        if flow.reserved_s >= 0:
            self._transfer(flow)

    def finished(self, worker: Worker, stay: Stay) -> None:
        flow = stay.flow
        flow.over = True
        del self.decodes.flows[worker][flow]
        flow.to_decode.ended()
        self.measured.finished(flow.request, self.clock.now_s)
        self._count(-1)
        self._leave_if_drained(self.decodes, worker)

    def stepped(self, steps: int, each_s: float, decodes: int) -> None:
        self.measured.stepped(steps, each_s, decodes)

    def cache_changed(self, worker: Worker, stored: list[bytes], removed: list[bytes]) -> None:
        group = self.prefills if worker.name in self.prefills.by_name else self.decodes
        group.routers.cache_changed(worker.name, stored, removed)

    # KV transfers.

    def _transfer(self, flow: Flow) -> None:
        """Queue the missing KV on the sender's link, because both sides are ready."""
        prefill, stay, link = flow.prefill, flow.at_prefill, self._setup.link
        assert prefill is not None
        assert stay is not None
        now_s = self.clock.now_s
        total = (flow.at_decode.tokens - flow.at_decode.cached) * link.bytes_per_token
        last = min(total, prefill.engine.max_step_tokens * link.bytes_per_token)  # the last chunk
        overlapped_s = max(0.0, flow.computed_s - max(stay.began_s, flow.reserved_s))
        left = max(last, total - overlapped_s * link.bytes_per_s)
        free_s = max(now_s, self.prefills.link_free_s.get(prefill, 0.0)) + left / link.bytes_per_s
        self.prefills.link_free_s[prefill] = free_s
        self.clock.at(free_s + link.latency_s, self._delivered, (flow, prefill, stay))

    def _delivered(self, sent: tuple[Flow, Worker, Stay]) -> None:
        flow, prefill, stay = sent
        decode, arrived = flow.decode, prefill.alive  # before a draining worker leaves below
        if arrived:
            prefill.release(stay)
            self.prefills.flows[prefill].pop(flow, None)
            self._leave_if_drained(self.prefills, prefill)
        if flow.to_prefill is not None:
            flow.to_prefill.ended()
        if flow.over or not arrived or not decode.alive:
            return  # the request has moved, or will
        flow.delivered = True
        if flow.to_prefill is not None:
            flow.to_prefill.succeeded()
        self._first_token(flow)
        if flow.at_decode.left:
            decode.deliver(flow.at_decode)
        else:
            decode.cancel(flow.at_decode)
            self.finished(decode, flow.at_decode)

    def _first_token(self, flow: Flow) -> None:
        flow.to_decode.succeeded()
        request = flow.request
        if request.first_s < 0:
            request.first_s = self.clock.now_s
            self.measured.began(request)

    # Workers that join, change and leave.

    def _group(self, role: Role, engine: Engine, make: MakePolicy, routers: int) -> Group:
        setup = self._setup
        seed = f"{setup.seed}/{role}"
        is_prefill = role == "prefill"
        made = Routers(
            make,
            routers,
            seed,
            setup.delays,
            engine.page_tokens,
            self.clock,
            or_none=is_prefill,  # decode computes prompts itself
            queries=setup.queries and is_prefill,
        )
        return Group(role, engine, made)

    def join(self, group: Group) -> Worker:
        worker = Worker(f"{group.role}-{len(group.workers):05}", group.engine, self.clock, self)
        group.add(worker)
        stranded, self._stranded = self._stranded, []
        for request, generated in stranded:
            self._dispatch(request, generated)
        return worker

    def drain(self, group: Group, worker: Worker) -> None:
        worker.draining = True
        group.routers.remove(worker.name)
        self._leave_if_drained(group, worker)

    def _apply(self, incident: Incident) -> None:
        group = self.prefills if incident.role == "prefill" else self.decodes
        if incident.kind == "add":
            self.joining -= 1
            self.join(group)
            return
        if incident.worker >= len(group.workers):
            return  # the incident is for another fleet size
        worker = group.workers[incident.worker]
        if incident.kind == "slow":
            worker.set_slowness(incident.factor)
        elif incident.kind == "lie":
            group.load_factors[worker] = incident.factor
        elif incident.kind == "drain":
            self.drain(group, worker)
        elif worker.alive:
            worker.stop()
            self.clock.at(self.clock.now_s + self._setup.delays.lost_s, self._lost, (group, worker))

    def _leave_if_drained(self, group: Group, worker: Worker) -> None:
        if worker.draining and worker.alive and not group.flows[worker]:
            worker.stop()

    def _lost(self, at: tuple[Group, Worker]) -> None:
        group, worker = at
        group.routers.remove(worker.name)
        flows, group.flows[worker] = group.flows[worker], {}
        for flow in flows:
            if flow.over:
                continue
            self.measured.moved += 1
            if worker is flow.prefill:
                self._compute_at_decode(flow)
            else:
                self._move(flow)

    def _compute_at_decode(self, flow: Flow) -> None:
        if flow.delivered or not flow.decode.alive:
            return
        old = flow.at_decode
        flow.decode.cancel(old)
        flow.prefill = flow.at_prefill = None
        flow.computed_s = -1.0
        flow.at_decode = Stay(flow.request, Part.FULL, old.tokens, old.left + 1)
        flow.at_decode.flow = flow
        flow.decode.submit(flow.at_decode)

    def _move(self, flow: Flow) -> None:
        flow.over = True
        flow.to_decode.ended()
        stay, prefill = flow.at_decode, flow.prefill
        left = stay.left + (stay.part is Part.DECODE and not flow.delivered)
        if prefill is not None and prefill.alive and not flow.delivered and flow.at_prefill is not None:
            self._drop_prompt(flow, prefill, flow.at_prefill)
        self._dispatch(flow.request, flow.request.output - left)

    def _drop_prompt(self, flow: Flow, prefill: Worker, stay: Stay) -> None:
        if flow.to_prefill is not None:
            flow.to_prefill.ended()
        if flow.computed_s < 0:
            prefill.cancel(stay)
        elif flow.reserved_s < 0:
            prefill.release(stay)  # otherwise the current transfer frees its pages
        self.prefills.flows[prefill].pop(flow, None)
        self._leave_if_drained(self.prefills, prefill)

    def _send_heartbeats(self, at: tuple[Group, int]) -> None:
        group, turn = at
        group.send_heartbeats(turn)
        self.clock.at(
            self.clock.now_s + self._setup.delays.heartbeat_s / PHASES, self._send_heartbeats, (group, turn + 1)
        )
