"""For a launcher to start: several runs of lipnext_scale.train on the same processes, one after the
other, because a start costs more than a small run.

    torchrun --nproc-per-node 2 started_runs.py FILE     FILE: a JSON list of lists of arguments
"""

import gc
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # as lipnext_scale does for its own commands, for a quicker start

import torch.distributed as dist

from lipnext_scale.train import main

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for arguments in json.loads(Path(sys.argv[-1]).read_text()):  # deepspeed adds its own before
        main(arguments)
    dist.destroy_process_group()
