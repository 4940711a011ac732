"""Trains as files say, in children that kill themselves, as a machine that fails would: nothing is handled or flushed.

Reads lines `{"config": FILE, "step": N}` and answers each with how the child ended. The library is imported once.
"""

import json
import os
import signal
import sys
from typing import Any

from transformers import TrainerCallback

from tokenahead.training.commands import train as commands
from tokenahead.training.commands.settings import read_settings
from tokenahead.training.pushing import TrainerPushMixin


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


def leave_out_cards(replace: Any) -> None:
    """They take much of the time of a run so short, and nothing of a run that goes on."""
    replace(TrainerPushMixin, "create_model_card", lambda self, *args, **given: None)


def main() -> None:
    leave_out_cards(setattr)
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if child == 0:
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
            commands.train(read_settings([wanted["config"]]), callbacks=[Killer(wanted["step"])])
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
