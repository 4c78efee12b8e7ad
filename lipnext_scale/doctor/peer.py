"""One of the processes that try a collective: a program of its own, which may hang or crash.

python -m lipnext_scale.doctor.peer ADDRESS PORT RANK WORLD_SIZE BACKEND LOCAL_RANK SECONDS

Meets the others at a store that is there already, sums a vector over all, and prints how many
milliseconds the second sum took; the first one also opens the connections.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta

NUMBERS = 1 << 18  # of float32: a MB


def main(argv: list[str]) -> None:
    import torch
    import torch.distributed as dist

    address, backend = argv[0], argv[4]
    port, rank, world_size, local_rank, seconds = (int(argv[i]) for i in (1, 2, 3, 5, 6))
    patience = timedelta(seconds=seconds)
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(address, port, is_master=False, timeout=patience)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"doctor/{backend}", store),
        rank=rank,
        world_size=world_size,
        timeout=patience,
    )
    for _ in range(2):
        values = torch.full((NUMBERS,), float(rank + 1), device=device)
        began = time.perf_counter()
        dist.all_reduce(values)
        total = values.sum().item()
        took = time.perf_counter() - began
        assert total == NUMBERS * world_size * (world_size + 1) / 2, f"the sum is {total}"
    print(f"{1000 * took:.1f}", flush=True)
    dist.destroy_process_group()


def start(
    address: str, port: int, rank: int, world_size: int, backend: str, local_rank: int, seconds: int
) -> subprocess.Popen[str]:
    values = (address, port, rank, world_size, backend, local_rank, seconds)
    return subprocess.Popen(
        [sys.executable, "-m", "lipnext_scale.doctor.peer", *map(str, values)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(peer: subprocess.Popen[str], seconds: float) -> tuple[bool, str]:
    """(whether it came through, its milliseconds or why it did not); it has ended then."""
    try:
        out, err = peer.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        peer.kill()
        peer.communicate()
        return False, f"no answer within {seconds:.0f} s"
    if peer.returncode == 0:
        return True, out.split()[-1]
    said = [line for line in err.splitlines() if "Error" in line] or err.splitlines()
    return False, said[-1].strip() if said else f"it ended with {peer.returncode}"


if __name__ == "__main__":
    main(sys.argv[1:])
