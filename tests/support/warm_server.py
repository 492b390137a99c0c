"""A process that has torch and det_core loaded, and forks one for each script that is asked for.

    python warm_server.py SOCKET MODULE...

A request is a line of JSON (argv, cwd, env, session, maybe python, tied) with three descriptors (stdin, stdout,
stderr). The answers are the pid and, once it has ended, the status as subprocess gives it. A script ends with this
server, and one that is tied with the process that asked for it.
"""

import array
import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile

_PR_SET_PDEATHSIG = 1
_status = 0  # of the script; negative: the signal it ends by


def serve(path):
    """Fork for each request; returns, in the new process, the request and its descriptors."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(256)
    wake, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asked = {}  # pid: the connection of who asked
    tied = {}  # connection: pid
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, wake, sys.stdin, *tied], [], [])
        if sys.stdin in ready:  # whoever started this one is gone
            for pid in asked:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        for connection in tied.keys() & set(ready):  # who asked was killed
            os.kill(tied.pop(connection), signal.SIGKILL)
        if wake in ready:
            os.read(wake, 4096)
            _tell_who_ended(asked, tied)
        if listener in ready:
            connection, _ = listener.accept()
            request, fds = _received(connection)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (wake, waker):
                    os.close(fd)
                for other in (listener, connection, *asked.values()):
                    other.close()
                return request, fds
            for fd in fds:
                os.close(fd)
            asked[pid] = connection
            if request.get("tied"):
                tied[connection] = pid
            connection.sendall(b"%d\n" % pid)


def _received(connection):
    data, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(12))
    fds = array.array("i", ancillary[0][2]).tolist()
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    return json.loads(data), fds


def _tell_who_ended(asked, tied):
    while asked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        with asked.pop(pid) as connection:
            tied.pop(connection, None)
            try:
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            except OSError:  # nobody waits for it any more
                continue


def become(request, fds):
    """Set this process up as one that has just been started."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if request["session"]:
        os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable = request.get("python", sys.executable)
    tempfile.tempdir = None
    for name in ("random", "numpy.random"):  # torch's seed is the same in every new process, as theirs is not
        if name in sys.modules:
            sys.modules[name].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(request["env"].get("OMP_NUM_THREADS", 1)))


def run(argv):
    """Run a script, or a module after ``-m``, as the interpreter does."""
    global _status
    sys.orig_argv = [sys.executable, *argv]
    try:
        if argv[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            path = os.path.abspath(argv[0])
            sys.path.insert(0, os.path.dirname(path))
            sys.argv = argv
            sys.modules["__main__"] = main = type(sys)("__main__")
            main.__file__, main.__builtins__ = path, __builtins__
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec")
            exec(code, main.__dict__)
    except SystemExit as e:
        _status = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if _status and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
    except BaseException as e:
        _status = -signal.SIGINT if isinstance(e, KeyboardInterrupt) else 1
        e = e.with_traceback(e.__traceback__.tb_next)  # as if this frame was not there
        sys.excepthook(type(e), e, e.__traceback__)


def end():
    """End without the last half of the interpreter's end, which touches each object of a forked process: 0.3 CPU s.

    It is the first function that was registered, so the last: threads were joined, and all others have been called.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    if _status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(_status & 0xFF)


if __name__ == "__main__":
    atexit.register(end)
    sys.path.pop(0)
    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    if "torch" in sys.modules:  # the first optimizer imports torch._dynamo: a second and more
        sys.modules["torch"].optim.SGD([sys.modules["torch"].nn.Parameter(sys.modules["torch"].zeros(1))], lr=0.1)
    gc.collect()
    gc.freeze()  # else a collection copies every page
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not to be forked"
    _request, _fds = serve(sys.argv[1])
    become(_request, _fds)
    for _path in reversed([p for p in _request["env"].get("PYTHONPATH", "").split(os.pathsep) if p]):
        if _path not in sys.path:
            sys.path.insert(0, _path)
    run(_request["argv"])
