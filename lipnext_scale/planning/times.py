"""How long a walked step takes on a device: its streams are replayed, with a clock each.

    host         a launch takes the host `launch_us`; a `wait` stops it until that stream, event or
                 device is done. It runs ahead of the device otherwise, into the next step too.
    stream       an operator begins when the host has launched it and its stream is done. It takes
                 the longer of FLOPs/rate and bytes/bandwidth. `record`, `stream_wait`: as in CUDA.
    collective   begins behind its stream's work and its group's; takes latency + bytes sent/rate,
                 as in NCCL's own model: a ring of R ranks has R-1 steps, a tree 2·log2. Between
                 nodes the rate is that of the cards of the group's GPUs in a node, or the link's if
                 that is slower. Its stream waits for it; of one begun with `async_op` the main
                 stream waits at the end of the phase.
    beside       a kernel next to a collective loses the share `beside`; two kernels next to each
                 other take as long as one after the other. This is added to the phase, whole.

A step's time is what the main stream takes for it after a step before it. Each moment of that
stream has a cause: arithmetic, memory, the host, or a collective in the node or across nodes.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lipnext_scale.planning.ledger import Row
from lipnext_scale.utils.errors import UserError

FILE = Path(__file__).with_name("devices.yaml")
MAIN = 0  # the stream
PARTS = ("arithmetic", "memory", "node", "network", "host", "beside")


@dataclass(frozen=True)
class Device:
    """Rates in FLOP/s and bytes/s, of what is reached; times in seconds."""

    name: str
    title: str
    capability: tuple[int, int]
    peak: dict[str, float]  # by the data sheet
    flops: dict[str, float]
    bandwidth: float
    memory: int
    overhead: int
    link: float
    network: float
    host: float
    launch: float
    beside: float
    protocols: tuple[tuple[float, float, float, float], ...]
    kernels: dict[str, float] = field(default_factory=dict)  # bytes/s of operators, measured
    measured: Any = None  # rates of `bench cpu`
    source: str = "planning/devices.yaml"


def devices() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    defaults = found.pop("defaults")
    return {name: defaults | values for name, values in found.items()}


def read_device(name: str, rates: str | None = None) -> Device:
    """rates: a file of `bench gpu` or `bench cpu`, over what devices.yaml has."""
    known = devices()
    if name not in known:
        raise UserError(f"--gpu = {name!r}: must be one of {', '.join(known)}")
    facts = known[name]
    reached = facts["reached"]
    peak = {precision: 1e12 * value for precision, value in facts["peak_tflops"].items()}
    device = Device(
        name=name,
        title=facts["title"],
        capability=tuple(facts["capability"]),
        peak=peak,
        flops={precision: reached[precision] * value for precision, value in peak.items()},
        bandwidth=1e12 * facts["bandwidth_tb"] * reached["memory"],
        memory=facts["memory_gib"] << 30,
        overhead=int(1e9 * facts["overhead_gb"]),
        link=1e9 * facts["link_gb"],
        network=1e9 * facts["network_gb"],
        host=1e9 * facts["host_gb"],
        launch=1e-6 * facts["launch_us"],
        beside=facts["beside"],
        protocols=tuple((1e-6 * a, 1e-6 * b, 1e-6 * c, d) for a, b, c, d in facts["protocols"]),
    )
    return _measured(device, rates) if rates else device


def _measured(device: Device, path: str) -> Device:
    if device.name == "cpu":
        from lipnext_scale.planning.cpu import read_rates

        return replace(device, measured=read_rates(path), source=path)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        named = {"bf16": "bf16_to_fp32", "tokens": "bf16_tokens", "fp32": "fp32", "tf32": "tf32"}
        flops = {p: 1e12 * found[f"product_{name}_tflops"] for p, name in named.items()}
        bandwidth = 1e9 * found["memory_copy_gb_per_second"]
        host = 1e9 * found["device_to_host_pinned_gb_per_second"]
    except (OSError, ValueError, KeyError, TypeError):
        right = "must be a file that `python -m lipnext_scale.bench gpu` has written"
        raise UserError(f"--rates = {path!r}: {right}") from None
    kernels = {
        f"lipnext::{key.removeprefix('kernel_').removesuffix('_gb_per_second')}": 1e9 * value
        for key, value in found.items()
        if key.startswith("kernel_") and key.endswith("_gb_per_second")
    }
    flops = device.flops | flops
    return replace(
        device, flops=flops, bandwidth=bandwidth, host=host, kernels=kernels, source=path
    )


# --------------------------------------------------------------------------------------------------
# What one row takes.


def seconds(row: Row, device: Device) -> tuple[float, str]:
    """(time alone on the device, `arithmetic` or `memory`) of a product, kernel or copy."""
    if device.measured is not None:
        from lipnext_scale.planning.cpu import seconds_of

        return seconds_of(row, device.measured), "arithmetic" if row.flops else "memory"
    if row.kind == "copy":
        return row.bytes / device.host, "memory"
    rate = device.kernels.get(row.name.rstrip("_"), device.bandwidth)
    moving = row.bytes / rate
    if not row.flops:
        return moving, "memory"
    tokens = row.in_block and row.precision == "bf16" and "tokens" in device.flops
    computing = row.flops / device.flops["tokens" if tokens else row.precision]
    return (computing, "arithmetic") if computing > moving else (moving, "memory")


def collective_seconds(row: Row, device: Device, nodes: int) -> float:
    """nodes: of the run. A group that crosses them is taken to be spread over all evenly."""
    over = min(row.ranks, nodes) if row.across else 1
    in_node = max(1, row.ranks // over)
    rate = min(device.link, in_node * device.network) if over > 1 else device.link
    sent = float(row.bytes)
    if row.name in ("broadcast", "reduce"):  # all of it passes each link; the row has the mean
        sent *= row.ranks / max(1, row.ranks - 1)
    if row.name == "all_reduce":  # a tree of nodes, chains in them
        inner, outer = 2.0 * (in_node - 1), 2 * math.log2(over)
    else:
        inner, outer = row.ranks - over, over - 1.0
    return min(
        base + inner * step + outer * far + sent / (share * rate)
        for base, step, far, share in device.protocols
    )


# --------------------------------------------------------------------------------------------------
# The replay.


@dataclass
class Clock:
    """Of a stream, or of an event on it: when it is done, and why not sooner."""

    time: float = 0.0
    cause: str = "memory"
    issued: float = 0.0  # what caused it began when the host had come to it, and not before


class Timeline:
    """`take` replays rows. parts: seconds of the main stream, by phase and cause."""

    def __init__(self, device: Device, nodes: int) -> None:
        self.device, self.nodes, self.host = device, nodes, 0.0
        self.streams: dict[int, Clock] = defaultdict(Clock)
        self.events: dict[int, Clock] = {}
        self.groups: dict[tuple[int, bool], float] = defaultdict(float)
        self.clear()

    def clear(self) -> None:
        self.parts: dict[str, dict[str, float]] = {}
        self.sending: dict[tuple[str, str], float] = defaultdict(float)  # (phase, axis): seconds
        self._kernels: list[tuple[float, float, str]] = []
        self._sides: list[tuple[float, float]] = []  # kernels of other streams
        self._collectives: list[tuple[float, float]] = []

    def take(self, rows: Iterable[Row]) -> None:
        phase = ""
        pending: list[Clock] = []
        for row in rows:
            if row.phase != phase:
                self._wait_for(pending, phase)
                phase, pending = row.phase, []
                self.parts.setdefault(phase, dict.fromkeys(PARTS, 0.0))
            if row.kind == "wait":
                self._stop_host(row)
            elif row.kind == "record":
                self.events[row.event] = replace(self.streams[row.stream])
            elif row.kind == "stream_wait":
                if row.event in self.events:
                    self._advance(row.stream, self.events[row.event], phase)
            else:
                self.host += self.device.launch
                if row.kind != "collective":
                    self._run(row)
                elif row.waited:
                    self._advance(row.stream, self._send(row), phase)
                else:
                    pending.append(self._send(row))
        self._wait_for(pending, phase)

    def _advance(self, stream: int, until: Clock, phase: str) -> None:
        """Let a stream wait. Of the main one the time goes to the host until that had come to what
        is waited for, and to its cause from there on."""
        clock = self.streams[stream]
        if until.time <= clock.time:
            return
        if stream == MAIN:
            late = min(max(until.issued - clock.time, 0.0), until.time - clock.time)
            self.parts[phase]["host"] += late
            self.parts[phase][until.cause] += until.time - clock.time - late
        self.streams[stream] = replace(until)

    def _run(self, row: Row) -> None:
        self._advance(row.stream, Clock(self.host, "host", self.host), row.phase)
        clock, (taken, cause) = self.streams[row.stream], seconds(row, self.device)
        interval = clock.time, clock.time + taken
        clock.time = interval[1]
        if row.stream == MAIN:
            self.parts[row.phase][cause] += taken
            self._kernels.append((*interval, row.phase))
        else:
            self._sides.append(interval)

    def _send(self, row: Row) -> Clock:
        axis, group = "network" if row.across else "node", (row.ranks, row.across)
        begin = max(self.host, self.streams[row.stream].time, self.groups[group])
        taken = collective_seconds(row, self.device, self.nodes)
        ended = Clock(begin + taken, axis, self.host if begin == self.host else 0.0)
        self.groups[group] = ended.time
        self.sending[row.phase, axis] += taken
        self._collectives.append((begin, ended.time))
        return ended

    def _wait_for(self, pending: list[Clock], phase: str) -> None:
        for ended in pending:
            self._advance(MAIN, ended, phase)

    def _stop_host(self, row: Row) -> None:
        if row.name == "event synchronize":
            done = self.events[row.event].time if row.event in self.events else 0.0
        elif row.name == "device synchronize":
            done = max(clock.time for clock in self.streams.values())
        else:
            done = self.streams[row.stream].time
        self.host = max(self.host, done) + row.bytes / self.device.host

    def add_beside(self) -> None:
        """What kernels lose to what runs next to them, to their phases."""
        sides = [(self.device.beside, self._collectives), (1.0, self._sides)]
        for share, intervals in sides:
            merged = list(_merged(intervals))
            for begin, end, phase in self._kernels:
                while merged and merged[0][1] <= begin:
                    merged.pop(0)
                for first, last in merged:
                    if first >= end:
                        break
                    overlap = min(end, last) - max(begin, first)
                    self.parts[phase]["beside"] += share * max(0.0, overlap)


def _merged(intervals: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    begin, end = -1.0, -1.0
    for first, last in sorted(intervals):
        if first > end:
            if end > begin:
                yield begin, end
            begin = first
        end = max(end, last)
    if end > begin:
        yield begin, end


@dataclass(frozen=True)
class Times:
    """Of a mean step: seconds by phase and cause; collectives' by phase and axis, hidden or not."""

    parts: dict[str, dict[str, float]]
    sending: dict[tuple[str, str], float]

    def of(self, *causes: str) -> float:
        return sum(parts[cause] for parts in self.parts.values() for cause in causes)

    @property
    def step(self) -> float:
        return self.of(*PARTS)

    @property
    def exposed(self) -> float:
        return self.of("node", "network")


def replay(steps: list[list[Row]], device: Device, nodes: int) -> Times:
    """The mean of `steps`, one after the other, behind one as the first."""
    timeline = Timeline(device, nodes)
    timeline.take(steps[0])
    timeline.clear()
    for rows in steps:
        timeline.take(rows)
    timeline.add_beside()
    n = len(steps)
    parts = {
        phase: {part: value / n for part, value in found.items()}
        for phase, found in timeline.parts.items()
    }
    return Times(parts, {key: value / n for key, value in timeline.sending.items()})
