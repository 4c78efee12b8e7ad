"""Timelines that were computed by hand: what hides, what is exposed, what the host holds up."""

import json
from dataclasses import replace

import pytest

from lipnext_scale.planning.ledger import Row
from lipnext_scale.planning.times import (
    Device,
    Timeline,
    collective_seconds,
    read_device,
    replay,
    seconds,
)
from lipnext_scale.utils.errors import UserError

# A FLOP, a byte and a byte on a link take a second each; the network is half as quick.
TOY = Device(
    name="toy",
    title="toy",
    capability=(9, 0),
    peak={"bf16": 2.0},
    flops={"bf16": 1.0},
    bandwidth=1.0,
    memory=1,
    overhead=0,
    link=1.0,
    network=0.5,
    host=1.0,
    launch=0.0,
    beside=0.0,
    protocols=((0.0, 0.0, 0.0, 1.0),),
)


def row(kind: str, phase: str = "forward", name: str = "x", **figures: object) -> Row:
    return Row(kind, phase, name, "", False, **figures)  # type: ignore[arg-type]


def product(flops: int, phase: str = "forward") -> Row:
    return row("product", phase, flops=flops, precision="bf16")


def gather(sent: int, stream: int, **figures: object) -> Row:
    return row("collective", name="all_gather", read=sent, ranks=2, stream=stream, **figures)


def event(number: int, recorded: int, waiting: int) -> list[Row]:
    return [
        row("record", event=number, stream=recorded),
        row("stream_wait", event=number, stream=waiting),
    ]


def causes(found, phase: str = "forward") -> dict[str, float]:
    return {part: value for part, value in found.parts[phase].items() if value}


def test_a_row_takes_the_longer_of_arithmetic_and_memory():
    assert seconds(product(5), TOY) == (5.0, "arithmetic")
    assert seconds(replace(product(5), read=4, written=3), TOY) == (7.0, "memory")
    assert seconds(row("copy", read=6), replace(TOY, host=2.0)) == (3.0, "memory")


def test_a_collective_on_another_stream_hides_behind_a_product():
    """Gathered in 3 s while the product takes 5; the second step's too."""
    step = [gather(3, 1), product(5), *event(1, 1, 0), product(2)]
    found = replay([step], TOY, 1)
    assert causes(found) == {"arithmetic": 7.0} and found.sending["forward", "node"] == 3


def test_what_does_not_hide_is_exposed():
    """The gather waits for the step before, as FSDP's does: 9 s, of which a product hides 5."""
    step = [*event(1, 0, 1), gather(9, 1), product(5), *event(2, 1, 0), product(2)]
    found = replay([step, step], TOY, 1)
    assert causes(found) == {"arithmetic": 7.0, "node": 4.0}
    assert found.step == 11 and found.exposed == 4


def test_a_group_sends_one_thing_after_the_other():
    timeline = Timeline(TOY, 1)
    timeline.take([gather(3, 1), gather(4, 2), *event(1, 2, 0)])
    assert timeline.streams[0].time == 7


def test_an_asynchronous_collective_is_waited_for_at_the_end_of_its_phase():
    rows = [gather(3, 0, waited=False), product(2), product(2, "norm")]
    timeline = Timeline(TOY, 1)
    timeline.take(rows)
    assert timeline.parts["forward"]["node"] == 1 and timeline.streams[0].time == 5


def test_launches_and_waits_hold_the_device_up():
    slow = replace(TOY, launch=2.0)
    short = [product(1)] * 3
    assert causes(replay([short], slow, 1)) == {"arithmetic": 3.0, "host": 3.0}
    long = [product(3)] * 3  # the host is ahead after the first step
    assert causes(replay([long], slow, 1)) == {"arithmetic": 9.0}
    # It waits at the end of every step: the first launch of the next is late.
    waiting = [*long, row("wait", name="item")]
    assert causes(replay([waiting], slow, 1)) == {"arithmetic": 9.0, "host": 2.0}


def test_a_gather_that_the_host_begins_late_is_the_hosts_fault():
    """Launched at 2 s, done at 3: the main stream loses 2 s to the host and 1 s to the link."""
    timeline = Timeline(replace(TOY, launch=2.0), 1)
    timeline.take([gather(1, 1), *event(1, 1, 0)])
    assert timeline.parts["forward"] | {"host": 2.0, "node": 1.0} == timeline.parts["forward"]


def test_kernels_lose_a_share_beside_a_collective_and_all_of_it_beside_kernels():
    step = [*event(1, 0, 1), gather(4, 1), product(10)]
    assert causes(replay([step], replace(TOY, beside=0.25), 1)) == {"arithmetic": 10, "beside": 1}
    step[2] = replace(product(3), stream=1)
    assert causes(replay([step], TOY, 1)) == {"arithmetic": 10, "beside": 3}


def test_rates_and_latencies_of_collectives():
    """Rings of GPUs with a card each, and a tree for sums; a broadcast passes all of its bytes."""
    device = replace(TOY, link=3.0, network=1.0, protocols=((5.0, 1.0, 10.0, 1.0),))
    inside = row("collective", name="all_gather", read=12, ranks=4)
    assert collective_seconds(inside, device, 1) == 5 + 3 * 1 + 12 / 3
    replicas = replace(inside, ranks=2, across=True)  # one GPU of each node
    assert collective_seconds(replicas, device, 2) == 5 + 10 + 12 / 1
    everyone = replace(inside, ranks=8, across=True)  # four of each: the links are slower
    assert collective_seconds(everyone, device, 2) == 5 + 6 * 1 + 10 + 12 / 3
    summed = replace(everyone, name="all_reduce", ranks=16)
    assert collective_seconds(summed, device, 4) == 5 + 6 * 1 + 4 * 10 + 12 / 3
    sent = replace(replicas, name="broadcast", read=6)
    assert collective_seconds(sent, device, 2) == 5 + 10 + 12 / 1
    quick = replace(device, protocols=((5.0, 1.0, 10.0, 1.0), (0.0, 0.0, 0.0, 0.25)))
    assert collective_seconds(replace(inside, read=1), quick, 1) == 1 / (3 * 0.25)


def test_profiles_and_measured_rates(tmp_path):
    h100 = read_device("h100")
    assert h100.flops["bf16"] == pytest.approx(0.65 * 989e12) and h100.memory > 80e9
    rates = {"bf16_tokens": 600, "bf16_to_fp32": 500, "fp32": 50, "tf32": 300}
    found = {f"product_{name}_tflops": rate for name, rate in rates.items()}
    found |= {"memory_copy_gb_per_second": 2500, "device_to_host_pinned_gb_per_second": 40}
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(found | {"kernel_moments_gb_per_second": 1000}))
    measured = read_device("h100", str(path))
    inside = replace(product(600), in_block=True)
    assert seconds(inside, measured)[0] == pytest.approx(1e-12)
    assert seconds(product(500), measured)[0] == pytest.approx(1e-12)
    assert seconds(row("kernel", name="lipnext::moments_", read=1000), measured)[0] == 1e-9
    for wrong in (["h200"], ["h100", str(tmp_path / "none.json")]):
        with pytest.raises(UserError, match="^--(gpu|rates) = "):
            read_device(*wrong)
