"""Running Python that a model wrote, without trusting it.

    host        `Sandbox`: run a script, or tests on a program; the verdict
    outcome     what goes in and comes out: limits, runs, examinations
    process     the zygote and its guests, as drumroll holds them; pipes: their files
    selftest    do the walls hold, and what to do where they do not
    ─────────── behind the walls: standard library only, started apart from drumroll
    zygote      the process from which all guests are forked
    walls       namespaces, root, limits, privileges; seccomp: the list of system calls
    guests      what runs in a guest: a script, a program under test, its tests
    exchange    calls and plain values between a program and its tests

What holds a program: a process of its own in new user, process, mount, network, IPC, host name and cgroup namespaces; a read-only root
with little more than Python in it; no privileges and no way to get one; a list of allowed system calls; limits on time, memory, disk,
threads and output. `Sandbox.start` tries all of it, and without it nothing is run.

What holds a verdict: the tests run in another guest than the program. The program sees the arguments of calls, and nothing else; what it
answers is copied as plain data before it is compared. The tests' guest reports with a nonce that the program cannot know.
"""

from drumroll.sandbox.host import Sandbox
from drumroll.sandbox.outcome import Ending, Examination, Limits, ScriptRun

__all__ = ["Ending", "Examination", "Limits", "Sandbox", "ScriptRun"]
