"""`python -m slowed_train`: lipnext_scale.train with a pause in every step.

A quick machine would else be through with a small run before it has had its faults.
"""

import gc
import time

if __name__ == "__main__":
    gc.disable()  # as lipnext_scale does for its own commands, for a quicker start

from lipnext_scale.data import Batch
from lipnext_scale.train import main
from lipnext_scale.training.trainer import Trainer

PAUSE = 0.02  # seconds
_step = Trainer.train_step


def _step_and_pause(self: Trainer, batch: Batch) -> object:
    values = _step(self, batch)
    time.sleep(PAUSE)
    return values


if __name__ == "__main__":
    Trainer.train_step = _step_and_pause  # type: ignore[assignment,method-assign]
    main()
