"""The system calls that a guest may make, and the kernel's filter for them. Pure: `program(machine)` gives the filter's bytes.

The filter is a list of what is allowed; everything else is refused with an error, so that Python raises and goes on. Calls that are named
in REFUSED fail with "Operation not permitted". All others fail with "Function not implemented", which makes the C library try an
older call. A call in another architecture's numbering ends the process.

The numbers are written as `name x86_64 aarch64`, with `-` where an architecture has no such call.
"""

from __future__ import annotations

import errno
import struct

ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70, preadv2 327 286,
    pwritev2 328 287, open 2 -, openat 257 56, close 3 57, close_range 436 436, lseek 8 62, sendfile 40 71, copy_file_range 326 285,
    fallocate 285 47, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48,
    faccessat2 439 439, statfs 137 43, fstatfs 138 44, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50,
    readlink 89 -, readlinkat 267 78, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -,
    link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -, symlinkat 266 36, chmod 90 -, fchmod 91 52,
    fchmodat 268 53, utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -, umask 95 166, truncate 76 45, ftruncate 77 46,
    fsync 74 82, fdatasync 75 83, flock 73 32, fadvise64 221 223, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10,
    listxattr 194 11, llistxattr 195 12, flistxattr 196 13,
    pipe 22 -, pipe2 293 59, dup 32 23, dup2 33 -, dup3 292 24, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72,
    epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19,
    timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
    mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, brk 12 214, msync 26 227, membarrier 324 283,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
    rt_sigtimedwait 128 137, sigaltstack 131 132, restart_syscall 219 128, pause 34 -, alarm 37 -, getitimer 36 102,
    setitimer 38 103, kill 62 129, tkill 200 130, tgkill 234 131, wait4 61 260,
    futex 202 98, set_robust_list 273 99, get_robust_list 274 100, set_tid_address 218 96, rseq 334 293,
    exit 60 93, exit_group 231 94, sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121,
    sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
    time 201 -, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
    times 100 153, getrusage 98 165, sysinfo 99 179, uname 63 160, getrandom 318 278, getcpu 309 168, getpid 39 172,
    getppid 110 173, gettid 186 178, getpgrp 111 -, getpgid 121 155, getsid 124 156, getuid 102 174, geteuid 107 175,
    getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getpriority 140 141, getrlimit 97 163,
    setrlimit 160 164
"""

REFUSED = """
    fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, socket 41 198, socketpair 53 199, ptrace 101 117, mount 165 40,
    umount2 166 39, unshare 272 97, setns 308 268, chroot 161 51, pivot_root 155 41, bpf 321 280, keyctl 250 219,
    perf_event_open 298 241, io_uring_setup 425 425, userfaultfd 323 282, memfd_create 319 279
"""

CHECKED = "clone 56 220, ioctl 16 29, fcntl 72 25, prctl 157 167, prlimit64 302 261"
"""Calls that are allowed for some values of one argument only: `rules_of_arguments` says which."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine, as the kernel calls it: its column in the tables, and its number in the kernel's audit headers."""

CLONE_THREAD = 0x10000
CLONE_NAMESPACES = 0x7E020080  # NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, bytes to read, non-blocking, close on exec
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # duplicates, flags, locks, the size of a pipe
PRCTLS = (15, 16)  # the thread's name
X32_BIT = 0x40000000  # x86_64's second numbering

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16  # offsets in the kernel's struct seccomp_data
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]
"""Operation, jump when true, jump when false, operand."""


def numbers(table: str, column: int) -> dict[str, int]:
    """Name → number in one architecture, without the calls that it lacks. Example: `numbers("dup 32 23", 1)` is `{"dup": 23}`."""
    rows = [entry.split() for entry in table.split(",")]
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def answer(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


def rules_of_arguments() -> dict[str, list[Instruction]]:
    """What decides, by the low half of one argument, on each call in CHECKED. Each list ends with an answer."""

    def one_of(values: tuple[int, ...], argument: int, refusal: int) -> list[Instruction]:
        tests = [step for value in values for step in ((JUMP_EQUAL, 0, 1, value), answer(ALLOW))]
        return [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument), *tests, answer(ERROR | refusal)]

    new_thread: list[Instruction] = [
        (LOAD, 0, 0, ARGUMENTS_AT),
        (JUMP_ANY_BIT, 2, 0, CLONE_NAMESPACES),
        (JUMP_ANY_BIT, 0, 1, CLONE_THREAD),
        answer(ALLOW),
        answer(ERROR | errno.EPERM),
    ]
    return {
        "clone": new_thread,
        "ioctl": one_of(IOCTLS, 1, errno.ENOTTY),
        "fcntl": one_of(FCNTLS, 1, errno.EPERM),
        "prctl": one_of(PRCTLS, 0, errno.EPERM),
        "prlimit64": one_of((0,), 0, errno.EPERM),  # its own limits, not those of another process
    }


def instructions(machine: str) -> list[Instruction]:
    """The filter for one architecture. Every jump is short: a call that is not meant skips to the next rule."""
    column, audit = MACHINES[machine]
    steps: list[Instruction] = [(LOAD, 0, 0, MACHINE_AT), (JUMP_EQUAL, 1, 0, audit), answer(KILL), (LOAD, 0, 0, NUMBER_AT)]
    if machine == "x86_64":
        steps += [(JUMP_AT_LEAST, 0, 1, X32_BIT), answer(KILL)]
    for number in numbers(ALLOWED, column).values():
        steps += [(JUMP_EQUAL, 0, 1, number), answer(ALLOW)]
    rules = rules_of_arguments()
    for name, number in numbers(CHECKED, column).items():
        steps += [(JUMP_EQUAL, 0, len(rules[name]), number), *rules[name]]
    for number in numbers(REFUSED, column).values():
        steps += [(JUMP_EQUAL, 0, 1, number), answer(ERROR | errno.EPERM)]
    return [*steps, answer(ERROR | errno.ENOSYS)]


def program(machine: str) -> bytes:
    """The filter as the kernel reads it: eight bytes for each instruction."""
    return b"".join(struct.pack("=HBBI", *step) for step in instructions(machine))
