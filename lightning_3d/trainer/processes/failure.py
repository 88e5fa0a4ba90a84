"""One rank fails: all end soon, having run their finalizers, and the first error is the one that is read."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import itertools
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from lightning_3d.collectives import all_gather_object
from lightning_3d.errors import ThreeDError
from lightning_3d.mesh import Mesh, where
from lightning_3d.trainer.data.batches import ReaderError
from lightning_3d.trainer.processes.siblings import Identity, Siblings
from lightning_3d.trainer.processes.tether import Holder, release

GRACE_S = 12.0
"""How long a rank may take to stop by itself once the job has failed."""
_PERIOD_S = 0.25
_ASK_EACH = 1024  # as many ranks ask the store in each period; of more, each asks in every second or third
_STUCK_S = 2.0  # no progress of the main thread for so long: it waits inside a collective
_TOLD_WITHIN_S = 2.0  # a rank that has failed says so after its connections break
_STUCK_AFTER_SIGNAL_S = 18.0  # long, because a healthy stage may wait for a long step of its neighbour
_FILE_VARIABLE = "LIGHTNING_3D_FAILURE_FILE"
_LAUNCHER_VARIABLE = "LIGHTNING_3D_LAUNCHER"
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"


class SiblingFailure(ThreeDError):
    """Another rank has failed, so this one stops; the error that matters was printed by that rank."""

    reason = "another rank has failed"

    def __init__(self) -> None:
        super().__init__(f"This rank stops: {self.reason}")  # raised from a thread, so it takes no argument


class FailureGuard:
    """Watches from a thread that this rank neither waits for, nor outlives, a job that has failed.

    A failing rank leaves its traceback in the store of the process group; the launcher leaves a note in a file when a
    process ends without a word. Every rank looks for both, for the store itself, and for the process that launched it.
    When one of them tells of a failure, the main thread is brought to raise: communicators are aborted, connections of
    a collective that does not return are cut, and busy Python code gets a :class:`SiblingFailure`. So ``finally``
    blocks, callbacks' ``on_exception`` and ``atexit`` run. Who has not left the Trainer after :data:`GRACE_S` seconds
    ends without further ado, with status 1.

    One rank alone is not watched.
    """

    def __init__(self) -> None:
        self._where = f"process {os.getpid()}"
        self._sizes: Any = None
        self._store: Any = None
        self.scope = "lightning_3d"
        """What names in the store begin with; another one in every run, because torchrun keeps the store."""
        self.each_period: Callable[[set[int], Any, str], None] | None = None
        """Called from the thread, with the signals that came, the store and :attr:`scope`."""
        self.patient = False
        """Whether the main thread may stand still though a signal has asked it to stop."""
        self._external = False
        self._siblings: Siblings | None = None
        self._armed = False
        self._run = 0
        self._ask_every = 1
        self._ending = False
        self._tripped: str | None = None
        self._raised = False
        self._told = False
        self._thread: threading.Thread | None = None
        self._file: Path | None = None
        self._launcher: Holder | None = None
        self._tethered = False
        self._wake_up: int | None = None
        self._wake_up_lock = threading.Lock()
        self._barrier: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return FailureGuard, ()  # what it watches is this process

    @property
    def has_failed(self) -> bool:
        """Whether this rank has raised or was told to stop."""
        return self._raised or self._tripped is not None

    @property
    def knows_why(self) -> bool:
        """Whether the cause of the failure has been told."""
        return self._told or self._tripped is not None

    def watch_launcher(self, external: bool = False) -> None:
        """From the first moment in a process that a launcher has started.

        Args:
            external: Not one of ours, so nobody but the ranks themselves tells when a process ends without a word.
        """
        self._external = external and _FILE_VARIABLE not in os.environ
        if self._external and _TORCHRUN_VARIABLE in os.environ:
            self._launcher = Holder.of(os.getppid())  # an agent that is killed leaves its workers behind
        if file := os.environ.get(_FILE_VARIABLE):
            self._file = Path(file)
        # As the launcher has put it down, not as it is found: it may have ended while this process started.
        pid, _, started = os.environ.get(_LAUNCHER_VARIABLE, "").partition(" ")
        if pid and int(pid) != os.getpid():
            self._launcher = Holder(int(pid), started)
            self._tethered = external
        if self._file is not None or self._launcher is not None:
            self._begin()
            self._arm()

    def start(self, mesh: Mesh) -> None:
        """Once the process group stands, and again at each later run of the Trainer."""
        if mesh.world.size == 1:
            return
        self._where, self._sizes = mesh.where, mesh.sizes
        self._ask_every = -(-mesh.world.size // _ASK_EACH)
        if self._store is None:
            # A connection of its own: the main thread may wait inside the other one.
            store = dist.distributed_c10d._get_default_store()
            self._store = store.clone() if hasattr(store, "clone") else store
        self._begin()  # before the others are known: what is told from then on counts
        told = all_gather_object((uuid.uuid4().hex, Identity.of_this_process()), mesh.control_world)
        self.scope = f"lightning_3d/{told[0][0]}"
        self._siblings = Siblings([identity for _, identity in told], mesh.rank) if self._external else None
        group = mesh.control_world.group
        self._barrier = lambda: dist.barrier(group=group)
        self._arm()
        if self._tethered:  # from here on there may be something to bring to an end
            release()

    def stop(self) -> None:
        """At the end of a run (``Strategy.teardown``). After a good one, no rank leaves before all have come here."""
        if self._barrier is not None and not self._raised and self._tripped is None:
            self._ending = True
            self._barrier()
        self._armed = False
        self._barrier = None
        self._set_wake_up(on=False)

    def failed(self, error: BaseException) -> None:
        """This rank has raised (``Strategy.on_exception``): tell the others, and print the error if it is the first."""
        self._raised = True
        if not self._armed:
            return
        self._arm_deadline()
        if self._tripped is not None or isinstance(error, (SiblingFailure, ReaderError)):
            return
        text = f"{self._where} failed first; the other ranks are being stopped.\n"
        if isinstance(error, KeyboardInterrupt):
            text = f"{self._where} was interrupted; the other ranks are being stopped.\n"
        else:
            text += "".join(traceback.format_exception(type(error), error, error.__traceback__))
        # A broken connection is what the others notice of a rank that has failed. It gets a moment to say so itself.
        broken = _is_broken_connection(error)
        first = self._announce(text, _TOLD_WITHIN_S if broken else 0.0)
        self._told = True
        if first:
            say(text)
            print_once(error)
        elif not broken:
            line = _in_one_line(error)
            say(f"{self._where} failed as well: {line}\n")
            if line in (self._reason() or ""):  # ranks that meet with the same error say where once
                print_once(error)

    def only_noticed(self, error: BaseException) -> bool:
        """Whether ``error`` is what this rank notices of another that has failed, which is known or heard of soon."""
        if not self._armed or not (isinstance(error, SiblingFailure) or _is_broken_connection(error)):
            return False
        deadline = time.monotonic() + _TOLD_WITHIN_S
        while (reason := self._tripped or self._reason()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if reason is not None:
            SiblingFailure.reason = reason.strip().splitlines()[0]
        return reason is not None

    def meet(self, word: str, patience_s: float) -> bool:
        """Whether every rank comes here, within some time, with the same word; the same answer on all that come.

        Through the store: other ranks may be stuck in a collective, or gone.
        """
        if self._store is None or self._sizes is None:
            return True
        decision = f"{self.scope}/meeting"
        deadline = time.monotonic() + patience_s
        try:
            self._store.add(f"{decision}/{word}", 1)
            while (
                came := self._store.add(f"{decision}/{word}", 0)
            ) < self._sizes.world and time.monotonic() < deadline:
                if self._tripped is not None or self._reason() is not None:
                    break
                time.sleep(0.1)
                came = self._store.add(f"{decision}/{word}", 0)
            answer = "yes" if came == self._sizes.world else "no"
            # One answer for all: a rank may have given up just when the last one came.
            return bool(self._store.compare_set(decision, "", answer) == b"yes")
        except Exception:  # the store has gone with its rank
            return False

    def trip(self, reason: str, announce: bool = False) -> None:
        """Make this rank stop because of what happened elsewhere.

        Args:
            reason: What happened; printed.
            announce: Also tell the ranks that only look at the store.
        """
        with self._lock:
            if self._tripped is not None:
                return
            self._tripped = reason
        SiblingFailure.reason = reason.strip().splitlines()[0]
        if announce:
            self._armed = not self._raised
            if self._announce(reason, 0.0):
                say(reason + "\n")
        threading.Thread(target=self._interrupt, name="lightning-3d-stop", daemon=True).start()

    def _begin(self) -> None:
        self._run += 1
        self._raised, self._told, self._tripped, self._ending = False, False, None, False

    def _arm(self) -> None:
        self._armed = True
        self._set_wake_up(on=True)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="lightning-3d-guard", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        signalled: float | None = None
        for period in itertools.count():
            time.sleep(_PERIOD_S)
            if not self._armed or self._tripped is not None:
                signalled = None
                continue
            if (reason := self._found_here()) is not None:
                self.trip(reason, announce=self._external)
                continue
            if period % self._ask_every == 0 and (reason := self._told_by_others()) is not None:
                self.trip(reason)
                continue
            signals = self._signals()
            if signals & {signal.SIGTERM, signal.SIGINT}:
                signalled = time.monotonic()
            if self.each_period is not None and self._store is not None:
                with contextlib.suppress(Exception):  # the store went away: the next look says so
                    self.each_period(signals, self._store, self.scope)
            # The launcher's SIGTERM or a Ctrl-C: Python acts on it once the main thread is back from C++, if ever.
            if signalled is not None and self._stands_still(_STUCK_AFTER_SIGNAL_S):
                self.trip("a signal asked it to stop while it waited for another rank", announce=self._external)

    def _reason(self) -> str | None:
        return self._found_here() or self._told_by_others()

    def _found_here(self) -> str | None:
        """What can be seen on this machine."""
        if self._file is not None and self._file.exists():
            return self._file.read_text(errors="replace") or "a process of this job has ended"
        if self._launcher is not None and self._launcher.has_ended:
            return f"the process that launched {self._where} has ended"
        rank = self._siblings.gone() if self._siblings is not None and self._armed else None
        if rank is None or self._ending:  # asked afterwards: it may have ended well
            return None
        return f"{where(rank, self._sizes)} has ended without a word; the other ranks are being stopped."

    def _told_by_others(self) -> str | None:
        if self._store is None:
            return None
        try:
            if self._store.check([self._key]):
                return str(self._store.get(self._key).decode(errors="replace"))
        except Exception:  # the store lives in rank 0, or in torchrun's agent
            return None if self._ending else "the process that holds the store (rank 0) has ended"
        return None

    def _announce(self, text: str, patience: float) -> bool:
        """Put the failure where all look; false when somebody was first."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if self._tripped is not None or self._reason() is not None:
                return False
        if self._store is None:
            return True
        try:
            value = self._store.compare_set(self._key, "", text)
        except Exception:  # without the store, the others notice that it is gone
            return True
        return bool(value == text.encode())

    @property
    def _key(self) -> str:
        return f"{self.scope}/failure"

    def _stands_still(self, seconds: float) -> bool:
        return not self.patient and _is_stuck(seconds) and not self.patient

    def _interrupt(self) -> None:
        """Bring the main thread to raise, or else end the process."""
        start, run = time.monotonic(), self._run
        _abort_communicators()
        cut = thrown = False
        while self._goes_on(run) and time.monotonic() - start < GRACE_S:
            if self._raised:  # it is on its way out
                time.sleep(_PERIOD_S)
            elif not cut and _is_stuck(_STUCK_S):
                _cut_local_connections()
                cut = True
            elif not thrown and time.monotonic() - start > 2 * _STUCK_S:
                # Also where it seemed stuck: a loop that sleeps looks like a wait, and raises when it wakes up.
                _throw(threading.main_thread(), SiblingFailure)
                thrown = True
            else:
                time.sleep(_PERIOD_S)
        if self._goes_on(run):
            self._end()

    def _arm_deadline(self) -> None:
        run = self._run

        def watch() -> None:
            time.sleep(GRACE_S)
            if self._goes_on(run):
                self._end()

        threading.Thread(target=watch, name="lightning-3d-deadline", daemon=True).start()

    def _goes_on(self, run: int) -> bool:
        """Whether the Trainer has not been left since: another run that follows is no concern of this one."""
        return self._armed and self._run == run

    def _end(self) -> None:
        say(f"{self._where} did not stop within {GRACE_S:g} s and is ended.\n")
        faulthandler.dump_traceback(all_threads=False)
        finalizers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
        finalizers.start()
        finalizers.join(3.0)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)

    def _set_wake_up(self, on: bool) -> None:
        """Let the C-level signal handler leave a note that this thread can read while the main thread is in C++."""
        if threading.current_thread() is not threading.main_thread():
            return
        if on and self._wake_up is None:
            read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            if (previous := signal.set_wakeup_fd(write, warn_on_full_buffer=False)) != -1:
                signal.set_wakeup_fd(previous)  # somebody else's event loop
                os.close(read)
                os.close(write)
            else:
                self._wake_up = read
        elif not on and self._wake_up is not None:
            write = signal.set_wakeup_fd(-1)
            with self._wake_up_lock:  # the thread must not read from what has the number next
                read, self._wake_up = self._wake_up, None
                os.close(read)
            os.close(write)

    def _signals(self) -> set[int]:
        """Signals that have come since this was last asked."""
        with contextlib.suppress(OSError), self._wake_up_lock:
            if self._wake_up is not None:
                return set(os.read(self._wake_up, 256))
        return set()


def leave_note(file: Path, reason: str) -> None:
    """Tell the ranks of this node that the job has failed; what was said first stays."""
    with contextlib.suppress(FileExistsError):
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(reason)
        try:
            os.link(temporary, file)
        finally:
            temporary.unlink()


def launch_variables(file: Path) -> dict[str, str]:
    """Environment variables by which a started process knows that it was started by us."""
    launcher = Holder.of(os.getpid())
    return {_FILE_VARIABLE: str(file), _LAUNCHER_VARIABLE: f"{launcher.pid} {launcher.started}"}


def print_once(known: BaseException) -> None:
    """Should this error end the process, do not print its traceback: it, or that of its cause, has been printed."""
    # A mark, because a reference would keep its frames alive.
    known._lightning_3d_printed = True  # type: ignore[attr-defined]
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_printed(error):
            say(f"{_in_one_line(error)}\n")
        else:
            previous(kind, error, trace)

    sys.excepthook = show


def is_printed(error: BaseException) -> bool:
    """Whether :func:`print_once` was called with this error."""
    return getattr(error, "_lightning_3d_printed", False)


def say(text: str) -> None:
    """Print to stderr under the name of the package."""
    # One write, so that what several ranks say does not mix.
    with contextlib.suppress(Exception):
        sys.stderr.write(f"\n[lightning_3d] {text}")
        sys.stderr.flush()


def _in_one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, SiblingFailure) else f"{type(error).__name__}: {text}"


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("onnection closed by peer", "onnection reset", "Broken pipe", "aborted", "gloo")
    )


def _abort_communicators() -> None:
    """End what NCCL has under way. Gloo knows no such thing: its connections are cut instead."""

    def abort() -> None:
        for group in list(dist.distributed_c10d._world.pg_names):
            with contextlib.suppress(Exception):
                group.abort()

    if dist.is_available() and dist.is_initialized():
        threading.Thread(target=abort, name="lightning-3d-abort", daemon=True).start()


def _cut_local_connections() -> None:
    """Shut down the TCP connections to processes of this machine, so that a collective waiting on them raises.

    Connections to elsewhere (a tracking server that a finalizer wants to reach) stay.
    """
    for entry in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ():
        with contextlib.suppress(OSError, ValueError):
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    here, there = connection.getsockname()[0], connection.getpeername()[0]
                    if here == there:
                        connection.shutdown(socket.SHUT_RDWR)


def _is_stuck(seconds: float) -> bool:
    """Whether the main thread stays at the very same instruction for this long."""
    deadline = time.monotonic() + seconds
    position = _main_position()
    while time.monotonic() < deadline:
        time.sleep(min(0.2, seconds))
        if _main_position() != position:
            return False
    return True


def _main_position() -> tuple[int, int] | None:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)


def _throw(thread: threading.Thread, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))
