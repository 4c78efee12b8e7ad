"""Whether processes reach each other: really tried, between two of this machine."""

import os
import socket
from datetime import timedelta

from lipnext_scale.doctor import peer
from lipnext_scale.doctor.report import Finding, ok, wrong

# What a process takes to start and to import torch on a busy machine.
START = 60


def local_gloo(seconds: int) -> Finding:
    """Two processes of this machine meet at a free port and sum a vector over gloo."""
    import torch.distributed as dist

    patience = timedelta(seconds=seconds + START)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
    pair = [
        peer.start("127.0.0.1", store.port, rank, 2, "gloo", rank, seconds) for rank in range(2)
    ]
    outcomes = [peer.outcome(one, seconds + START) for one in pair]
    for came_through, told in outcomes:
        if not came_through:
            return wrong("gloo", f"two processes of this machine: {told}", gloo_mend())
    slowest = max(float(told) for _, told in outcomes)
    return ok("gloo", f"two processes of this machine sum 1 MB in {slowest:.1f} ms")


def gloo_mend() -> str:
    """gloo listens where the host's name leads to, or on the interface that is set."""
    there = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is not None and not set(chosen.split(",")) <= set(there):
        return (
            f"GLOO_SOCKET_IFNAME = {chosen!r} is none of {', '.join(there)}: set one, or unset it"
        )
    host = socket.gethostname()
    try:
        socket.gethostbyname(host)
    except OSError:
        return f"the name {host} leads nowhere: echo '127.0.1.1 {host}' >> /etc/hosts"
    return f"export GLOO_SOCKET_IFNAME=ONE, of {', '.join(there)}"
