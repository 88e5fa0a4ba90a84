"""How the ranks of a node start, and how they end together."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.multiprocessing as mp
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork, _check_missing_main_guard
from lightning.fabric.strategies.launchers.subprocess_script import (
    _HYDRA_AVAILABLE,
    _basic_subprocess_cmd,
    _hydra_subprocess_cmd,
)
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.trainer.module.marks import Marks
from lightning_3d.trainer.module.methods import bound_as_they_are
from lightning_3d.trainer.processes.failure import (
    GRACE_S,
    FailureGuard,
    SiblingFailure,
    is_printed,
    launch_variables,
    leave_note,
    print_once,
    say,
)
from lightning_3d.trainer.processes.rank_errors import PrintedError, ending, rank_error
from lightning_3d.trainer.processes.tether import tethered
from lightning_3d.trainer.setup.preflight import check_checkpoint

_PRELOADED = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "lightning.pytorch", "lightning_3d"]
_KILL_AFTER_S = 5.0


def make_launcher(
    strategy: ParallelStrategy,
    cluster_environment: ClusterEnvironment,
    start_method: str | None,
    guard: FailureGuard,
    where: Callable[[int], str],
    check: Callable[..., None],
) -> _SubprocessScriptLauncher | _MultiProcessingLauncher:
    """The launcher for a start method.

    Args:
        strategy: The strategy whose ranks are started.
        cluster_environment: Under torchrun or SLURM, where the ranks run already, nothing is started.
        start_method: ``"popen"`` starts the script again for every rank (the default), ``"fork"``, ``"forkserver"``
            and ``"spawn"`` start functions. In a notebook the default is ``"fork"``.
        guard: The guard of this process.
        where: Names a rank of this node, given its local rank, with its place on the mesh. Must pickle.
        check: Called with the Trainer and what it was given before processes are started; what it raises keeps them
            from starting. Must pickle.

    Raises:
        ConfigError: for a start method that this platform lacks.
    """
    num_processes: int = strategy.num_processes  # type: ignore[attr-defined]
    num_nodes: int = getattr(strategy, "num_nodes", 1)
    if start_method is None:
        start_method = "fork" if hasattr(sys, "ps1") else "popen"
    if start_method == "popen" or cluster_environment.creates_processes_externally:
        return ScriptLauncher(cluster_environment, num_processes, num_nodes, guard, where, check)
    if start_method not in mp.get_all_start_methods():
        known = ", ".join(["popen", *mp.get_all_start_methods()])
        raise ConfigError(f"start_method={start_method!r} does not exist on this platform. Choose from {known}.")
    if num_nodes > 1:
        raise ConfigError(
            f"start_method={start_method!r} starts the ranks of one machine, but num_nodes={num_nodes}."
            " Use start_method='popen', torchrun or SLURM."
        )
    return ProcessLauncher(strategy, start_method, where, check)  # type: ignore[arg-type]


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the user's script again for every other rank of the node; this process is rank 0 of the node.

    Args:
        cluster_environment: How ranks find each other.
        num_processes: Ranks on this node.
        num_nodes: Nodes.
        guard: The guard of this process.
        where: Names a rank of this node, given its local rank, with its place on the mesh. Must pickle.
        check: Called with the Trainer and what it was given before processes are started; what it raises keeps them
            from starting. Must pickle.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        guard: FailureGuard,
        where: Callable[[int], str],
        check: Callable[..., None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._guard = guard
        self._where = where
        self._check_module = check
        self._file: Path | None = None
        self._failed = False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if self.cluster_environment.creates_processes_externally:
            self._guard.watch_launcher(external=True)
        elif self.num_processes > 1:
            if self.num_nodes == 1:  # of several, one that refuses would leave the others waiting for it
                check_checkpoint(function, args, kwargs)
            self._check_module(trainer, args)
            self._file = _note_file()
            variables = launch_variables(self._file)
            os.environ.update(variables)
            try:
                self._call_children_scripts()
            except BaseException:  # no memory for one more, say
                _end_together(self.procs, _poll_all)
                raise
            finally:
                for name in variables:
                    os.environ.pop(name)
            threading.Thread(target=self._watch, name="lightning-3d-children", daemon=True).start()
            atexit.register(self._reap)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not self._guard.only_noticed(error):
                raise
            noticed = SiblingFailure()
            print_once(noticed)
            raise noticed from None

    @override
    def _call_children_scripts(self) -> None:
        """As Lightning does, each tethered to this process: it may be killed while they still import."""
        self._check_can_spawn_children()
        os.environ.update(
            MASTER_ADDR=self.cluster_environment.main_address,
            MASTER_PORT=str(self.cluster_environment.main_port),
            NODE_RANK=str(self.cluster_environment.node_rank()),
            LOCAL_RANK=str(self.cluster_environment.local_rank()),
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
        )
        for rank in range(1, self.num_processes):
            command, folder = _script(rank)
            environment = {**os.environ, "LOCAL_RANK": str(rank)}
            self.procs.append(subprocess.Popen(tethered(list(command)), env=environment, cwd=folder))

    @override
    def kill(self, signum: int) -> None:
        if signum == signal.SIGTERM:
            super().kill(signum)
            return
        # Lightning wants SIGKILL after Ctrl-C. The others get to close their loggers first.
        self._failed = True
        if self._file is not None:
            leave_note(self._file, f"{self._where(0)} was interrupted")
        self._reap()

    def _watch(self) -> None:
        while True:
            codes = [process.poll() for process in self.procs]
            failed = [rank for rank, code in enumerate(codes, start=1) if code]
            if failed:
                break
            if all(code == 0 for code in codes):
                return
            time.sleep(0.25)
        self._failed = True
        if self._guard.knows_why:
            return
        reason = f"{self._where(failed[0])} {ending(codes[failed[0] - 1] or 0)}; the other ranks are being stopped."
        if self._file is not None:
            leave_note(self._file, reason)
        self._guard.trip(reason, announce=True)
        _end_together(self.procs, _poll_all)

    def _reap(self) -> None:
        """After a failure, outlive the others: nobody is left behind."""
        if self._failed or self._guard.has_failed:
            self._failed = True
            if self._file is not None:
                leave_note(self._file, f"{self._where(0)} has failed")
            _end_together(self.procs, _poll_all)
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _script(rank: int) -> tuple[Sequence[str], str | None]:
    """The command that starts the user's script again, and the folder to start it in."""
    if _HYDRA_AVAILABLE:
        from hydra.core.hydra_config import HydraConfig  # type: ignore[import-not-found]

        if HydraConfig.initialized():
            return _hydra_subprocess_cmd(rank)
    return _basic_subprocess_cmd(), None


class ProcessLauncher(_MultiProcessingLauncher):
    """Starts a function in a fresh process for every rank; this process waits for them.

    Args:
        strategy: The strategy whose ranks are started.
        start_method: ``"fork"``, ``"forkserver"`` or ``"spawn"``.
        where: Names a rank of this node, given its local rank, with its place on the mesh. Must pickle.
        check: Called with the Trainer and what it was given before processes are started; what it raises keeps them
            from starting. Must pickle.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        start_method: Literal["spawn", "fork", "forkserver"],
        where: Callable[[int], str],
        check: Callable[..., None],
    ) -> None:
        super().__init__(strategy, start_method)
        self._where = where
        self._check_module = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self._check(trainer)
        check_checkpoint(function, args, kwargs)
        self._check_module(trainer, args)
        strategy = self._strategy
        assert strategy.cluster_environment is not None
        file = _note_file()
        environment = {
            "MASTER_PORT": str(strategy.cluster_environment.main_port),
            "MASTER_ADDR": strategy.cluster_environment.main_address,
            **launch_variables(file),
        }
        context = mp.get_context(self._start_method)
        if self._start_method == "forkserver":
            context.set_forkserver_preload(_PRELOADED)
        results = context.SimpleQueue()
        module = trainer.lightning_module if trainer is not None and self._start_method != "fork" else None
        marks = Marks.of(module, self._start_method) if module is not None else None
        start = _Start(environment | _seed_variables(), _GlobalStateSnapshot.capture(), marks)
        try:
            with bound_as_they_are():
                started = mp.start_processes(
                    self._run_rank,
                    args=(start, trainer, function, args, kwargs, results),
                    nprocs=strategy.num_processes,  # type: ignore[attr-defined]
                    start_method=self._start_method,
                    join=False,
                )
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            file.unlink(missing_ok=True)
            if "pickle" not in str(error).lower():
                raise
            raise ConfigError(
                f"start_method={self._start_method!r} sends the Trainer, its callbacks, the module and the loaders to"
                f" the ranks, and a part of them does not pickle: {error}. Use start_method='popen' (the script runs"
                " again in every process) or 'fork', or functions of a module instead of lambdas and inner functions."
            ) from error
        self.procs = list(started.processes)
        try:
            with _passing_on(signal.SIGTERM, self.procs[0]):
                self._wait(started.error_files, file)
        except BaseException:
            leave_note(file, "The job was stopped.")
            _end_together(self.procs, _join_all)
            raise
        finally:
            file.unlink(missing_ok=True)
        if results.empty():  # a signal has asked the ranks to stop, and they have done so in good order
            raise SIGTERMException
        output = results.get()
        if trainer is None:
            return output
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def _check(self, trainer: Trainer | None) -> None:
        if self._start_method in ("fork", "forkserver"):
            _check_bad_cuda_fork()
        if self._start_method in ("spawn", "forkserver"):
            _check_missing_main_guard()
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise ConfigError(
                f"trainer.fit() was called twice with start_method={self._start_method!r}, whose ranks have ended with"
                " the first fit. Make a new Trainer and give fit(ckpt_path=...), or use start_method='popen'."
            )

    def _run_rank(self, index: int, start: _Start, trainer: Trainer | None, *arguments: Any) -> None:
        start.apply()
        if start.marks is not None and trainer is not None:
            start.marks.put_on(trainer.lightning_module)
        guard = getattr(self._strategy, "guard", None)
        if isinstance(guard, FailureGuard):
            guard.watch_launcher()
        try:
            self._wrapping_function(index, trainer, *arguments)
        except BaseException as error:
            # Where ranks are functions, Lightning handles errors in the parent only: too late for what these ranks
            # hold (callbacks, loggers), and for the siblings that wait for this one.
            if trainer is not None:
                _interrupt(trainer, error)
                trainer._teardown()
            if is_printed(error):
                raise PrintedError.of(error) from None
            raise

    def _wait(self, error_files: Sequence[str], file: Path) -> None:
        """Until all ranks are done.

        Raises:
            ProcessRaisedException, ProcessExitedException: when one has failed, after the others have ended.
        """
        waiting = {process.sentinel: rank for rank, process in enumerate(self.procs)}
        while waiting:
            for sentinel in wait(list(waiting)):
                rank = waiting.pop(cast(int, sentinel))
                process = self.procs[rank]
                process.join()
                if process.exitcode:
                    # Ranks that stop because of another one may be faster; what that one left behind comes first.
                    reason = f"{self._where(rank)} {ending(process.exitcode)}; the other ranks are being stopped."
                    leave_note(file, reason)
                    if not os.path.exists(error_files[rank]):  # it could not say anything itself
                        say(reason + "\n")
                    _end_together(self.procs, _join_all)
                    raise rank_error(rank, self.procs, error_files, self._where)

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        """As Lightning does, in the types that were trained: this process has built its module in float32."""
        if worker_output.weights_path is not None:
            trained = torch.load(worker_output.weights_path, map_location="meta", weights_only=True)
            module = trainer.lightning_module
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if name in trained and tensor.is_floating_point() and not tensor.is_meta:
                    tensor.data = tensor.data.to(trained[name].dtype)
        super()._recover_results_in_main_process(worker_output, trainer)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        """As Lightning does, with the weights of the whole model where the strategy has put them together."""
        gathered = getattr(self._strategy, "final_state_dict", None)
        module = trainer.lightning_module
        # Lightning takes the module's own state, of which this rank holds only a part.
        vars(module)["state_dict"] = lambda *args, **kwargs: gathered or {}
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del vars(module)["state_dict"]


class _Start:
    """What a rank takes over from the process that starts it."""

    def __init__(self, environment: dict[str, str], state: _GlobalStateSnapshot, marks: Marks | None) -> None:
        self.environment = environment
        self.state = state
        self.marks = marks
        """Of the parameters; ``None`` where they arrive as they are."""

    def apply(self) -> None:
        # A forkserver is as old as its first use: its children do not see what was set since.
        os.environ.update(self.environment)
        self.state.restore()
        # A scheduler that was made before wraps its optimizer's step, which an optimizer that is sent leaves behind.
        warnings.filterwarnings("ignore", message=r"Seems like `optimizer.step\(\)` has been overridden")


@contextlib.contextmanager
def _passing_on(signum: signal.Signals, process: Any) -> Iterator[None]:
    """What is asked of this process, which only waits, is asked of the one that works."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)

    before = signal.signal(signum, pass_on)
    try:
        yield
    finally:
        signal.signal(signum, before)


def _seed_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PL_")}


def _note_file() -> Path:
    return Path(tempfile.gettempdir(), f"lightning-3d-{os.getpid()}-{time.monotonic_ns()}")


def _poll_all(processes: Sequence[Any], seconds: float) -> list[Any]:
    deadline = time.monotonic() + seconds
    while (alive := [process for process in processes if process.poll() is None]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def _join_all(processes: Sequence[multiprocessing.Process], seconds: float) -> list[Any]:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process for process in processes if process.is_alive()]


def _end_together(processes: Sequence[Any], alive: Callable[[Sequence[Any], float], list[Any]]) -> None:
    """Wait for processes that have been told to stop, then ask with SIGTERM, then do not ask."""
    # Their guards end them within the grace period, finalizers run; SIGTERM is for those that have not come that far.
    for signum, patience in ((signal.SIGTERM, GRACE_S + 3.0), (signal.SIGKILL, _KILL_AFTER_S)):
        for process in alive(processes, patience):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)
    alive(processes, _KILL_AFTER_S)
