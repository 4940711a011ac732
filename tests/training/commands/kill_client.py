"""Trains as a file says, and kills itself, as a machine that fails would: no handler runs, nothing is flushed.

python -m tests.training.commands.kill_client CONFIG.yaml STEP [FLAGS]
"""

import os
import signal
import sys
from typing import Any

from transformers import TrainerCallback

from tokenahead.training.commands.settings import read_settings
from tokenahead.training.commands.train import train


class Killer(TrainerCallback):
    """SIGKILL at the end of a step.

    Args:
        step: Of the whole training.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the process."""
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train(read_settings([sys.argv[1], *sys.argv[3:]], "train"), callbacks=[Killer(int(sys.argv[2]))])
