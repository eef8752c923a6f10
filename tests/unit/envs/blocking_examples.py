"""Environments for the tests of `drumroll.envs.blocking`, as a plugin file: a child process finds them by its path."""

import os
import signal
import sys
import threading
from pathlib import Path

from drumroll.envs.base import Step
from drumroll.envs.blocking import BlockingConfig, BlockingEnv
from drumroll.errors import PolicyFault

LEAKED: list[bytearray] = []
MEETING = threading.Barrier(2, timeout=60)


class Moody(BlockingEnv):
    """Does what the reply says, and writes every call into a file."""

    class Config(BlockingConfig):
        log: str

    def begin(self, task):
        self.name = task.id
        self._note("begin")
        if task.data.get("fail"):
            raise KeyError("no such board")
        return Step(prompt=f"{os.getpid()}")

    def act(self, reply):
        self._note(f"act {reply.partition(':')[0]}")
        match reply.split(":"):
            case ["hang"]:
                threading.Event().wait()
            case ["read", path]:
                Path(path).read_text()  # a pipe: blocks until somebody has written into it
            case ["meet"]:
                MEETING.wait()
            case ["die"]:
                os._exit(3)
            case ["crash"]:
                os.kill(os.getpid(), signal.SIGSEGV)
            case ["raise"]:
                raise KeyError("nothing here")
            case ["fault"]:
                raise PolicyFault(-1.0, "off the board")
            case ["exit"]:
                sys.exit("enough")
            case ["iterate"]:
                raise StopIteration
            case ["type"]:
                return "a text"
            case ["leak"]:
                LEAKED.append(bytearray(64 << 20))
            case ["odd"]:
                return Step(prompt="", metrics={"function": lambda: 1.0})
        return Step(prompt=f"{os.getpid()}", done=reply == "done", reward=0.5, success=True)

    def end(self):
        self._note("end")

    def _note(self, what):
        with open(self.config.log, "a") as log:
            log.write(f"{self.name} {what}\n")
