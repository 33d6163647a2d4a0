# SPDX-License-Identifier: Apache-2.0
"""Servers without their imports: a process that has imported sglang's server, and has run nothing of it, forks them.

What is forked is ``python -m sglang.launch_server`` with its arguments and its environment, and the processes that it
spawns through multiprocessing: schedulers and detokenizer. Those are forked from a copy of this process that the server
makes before anything of it runs, and are handed what a spawned process is handed, so that no state reaches them on
another way. Three imports of sglang take 20 s of a core and more; this takes one for all servers.

    python fork_server.py, a JSON line on stdin for each request:
    {"start": [server arguments], "env": {whole environment}, "own": {what of it is this server's}, "log": path}
        ->  pid of the server, a session of its own; or a text that says why not: a variable of its own was read while
        sglang was imported, and had another value
    {"status": pid}  ->  null while it runs, else its exit code as subprocess gives it
"""

import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys
import time

import setproctitle

PROGRAM = "sglang.launch_server"
# What the three kinds of processes import before they read their arguments; not PROGRAM, which is run. And the ops of
# the kernel package: torch asks for the source of each one that is declared, which takes half a second.
IMPORTED = [
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sgl_kernel_sm120",
]
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Read at import too, but a server takes its own: run_server puts the paths in; the other is read again when it is used.
FREE = {"PYTHONPATH", "SGLANG_CPU_OMP_THREADS_BIND"}
HIGH_FD = 512  # above every descriptor that is handed to a spawned process


class RecordedEnvironment:
    """Which variables were asked for."""

    def __enter__(self):
        self.names, self.original = set(), os._Environ.__getitem__

        def getitem(environ, name):
            self.names.add(name)
            return self.original(environ, name)

        os._Environ.__getitem__ = getitem
        return self

    def __exit__(self, *exception):
        os._Environ.__getitem__ = self.original


def main():
    # Finds the memory of the title, which ends where the first environment begins.
    setproctitle.getproctitle()
    # The platform is chosen by the command line, while sglang is imported.
    set_command_line(["--device", "cpu"])
    given = dict(os.environ)
    with RecordedEnvironment() as read:
        for module in IMPORTED:
            importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread: what it holds is lost in a fork"
    gc.collect()
    gc.freeze()
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        request = json.loads(line)
        if "status" in request:
            pid, status = os.waitpid(request["status"], os.WNOHANG)
            reply = os.waitstatus_to_exitcode(status) if pid else None
        elif late := sorted(
            name for name, value in request["own"].items() if name in read.names - FREE and value != given.get(name)
        ):
            reply = f"{late} was read while sglang was imported: see IMPORT_TIME in servers.py"
        else:
            reply = os.fork()
            if reply == 0:
                set_by_imports = {name: value for name, value in os.environ.items() if given.get(name) != value}
                set_environment(request["env"] | set_by_imports)
                return run_server(request, close=(requests, replies))
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def run_server(request, close):
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for file in close:
        file.close()
    null, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    for fd, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    os.close(null)
    os.close(log)
    sys.path[:0] = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    spawn = make_spawner()
    original = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = lambda path, command, fds: (
        spawn(command, fds) if "--multiprocessing-fork" in command else original(path, command, fds)
    )
    set_command_line(request["start"])
    setproctitle.setproctitle(" ".join(sys.orig_argv))
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)


def set_command_line(arguments):
    sys.argv, sys.orig_argv = ["-m", *arguments], [sys.executable, "-m", PROGRAM, *arguments]


def set_environment(env):
    os.environ.clear()
    os.environ.update(env)


def prctl(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def make_spawner():
    """-> f(command of a spawned process, its descriptors) -> its pid; it is a child of this process."""
    server = os.getpid()
    # The parent of a spawned process ends at once, and this process takes its place.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        serve_spawns(theirs, server)  # returns in the spawned processes only
        sys.exit()
    theirs.close()

    def spawn(command, fds):
        fds = sorted({int(fd) for fd in fds})
        arguments = {"command": [os.fsdecode(part) for part in command], "fds": fds, "env": dict(os.environ)}
        socket.send_fds(ours, [json.dumps(arguments | {"cwd": os.getcwd()}).encode()], fds)
        answer = ours.recv(64)
        if not answer:
            raise OSError("the process that forks the spawned ones has ended")
        return int(answer)

    return spawn


def serve_spawns(channel, server):
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 20, 64)
        if not message:
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            if os.fork():
                os._exit(0)
            return run_spawned(channel, server, json.loads(message), fds)
        for fd in fds:
            os.close(fd)
        os.waitpid(middle, 0)


def run_spawned(channel, server, arguments, fds):
    while os.getppid() != server:
        time.sleep(0.001)
    channel.send(str(os.getpid()).encode())
    # The same descriptors under the same numbers, and no other.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH_FD) for fd in fds]
    channel.detach()
    os.closerange(3, HIGH_FD)
    for fd, target in zip(high, arguments["fds"], strict=True):
        os.dup2(fd, target, inheritable=False)
        os.close(fd)
    os.chdir(arguments["cwd"])
    set_environment(arguments["env"])
    *_, code, flag = arguments["command"]  # python ... -c CODE --multiprocessing-fork
    sys.argv, sys.orig_argv = ["-c", flag], arguments["command"]
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    main()
