"""``strategy="3d"``: what the Lightning Trainer calls."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_3d.checkpoint import BackgroundSaves, WholeValues
from lightning_3d.config import ParallelConfig, Size, Sizes
from lightning_3d.events import DeviceClock, EventSource
from lightning_3d.mesh import AXES, Mesh, Where, build_mesh, side_mesh
from lightning_3d.monitor.ranges import Ranges, name_spans_for
from lightning_3d.pipeline.compiling import Compiler
from lightning_3d.precision import ThreeDPrecision
from lightning_3d.progress import Progress
from lightning_3d.trainer.callbacks.served import ServedCallbacks
from lightning_3d.trainer.data.global_batch import tell_schedulers
from lightning_3d.trainer.data.ledger import BatchLedger
from lightning_3d.trainer.data.loaders import LoaderGate
from lightning_3d.trainer.data.predictions import PredictionGate
from lightning_3d.trainer.logging.hook_logs import HookLogs
from lightning_3d.trainer.module.compiled import TakesCompiled
from lightning_3d.trainer.preemption import Preemption
from lightning_3d.trainer.processes.elastic import fit_to_world
from lightning_3d.trainer.processes.failure import FailureGuard
from lightning_3d.trainer.processes.flight_recorder import FlightRecorder
from lightning_3d.trainer.processes.watchdog import Watchdog
from lightning_3d.trainer.setup.assembly import Assembly, assemble
from lightning_3d.trainer.setup.choice import has_choice, possible
from lightning_3d.trainer.setup.chooser import agree, choose_here
from lightning_3d.trainer.setup.launcher import make_launcher
from lightning_3d.trainer.setup.layout import Layout
from lightning_3d.trainer.setup.preflight import (
    bubble_warning,
    check_launch,
    check_module,
    check_optimizers,
    check_plugins,
)
from lightning_3d.trainer.setup.start import share_random_state, start_small
from lightning_3d.trainer.step.clock import follow_one_clock
from lightning_3d.trainer.step.sanity import SanityChecks
from lightning_3d.trainer.step.steps import StepRunner
from lightning_3d.trainer.step.torch_clipping import TorchClipping
from lightning_3d.trainer.stepping import SteppingStrategy

_LAST_SAVE_S = 600.0
"""How long a rank that fails waits for a save under way before it tells the others."""
_LAST_CHANCE_S = 5.0
"""How long a rank that stops because of another one lets a save under way go on."""


class ThreeDStrategy(TakesCompiled, SteppingStrategy):
    """Trains an unmodified LightningModule with tensor, pipeline and sharded data parallelism.

    The world is a mesh with the axes pp (outermost), dp and tp (innermost). Losses, gradients, clipping, metrics and
    checkpoints are those of one process that trains on the whole batch.

    Args:
        tensor_parallel: Ranks that share every layer; keep it inside a node. ``"auto"`` is chosen by the planner from
            the module and the memory of the devices (1 where replicas fit), and the reason printed.
        pipeline_parallel: Stages that the layers are cut into. ``"auto"`` is chosen in the same way.
        data_parallel: Replicas of the model. ``"auto"`` is what the other two leave of the world.
        zero_stage: What the replicas share out among them: 0 nothing, 1 the optimizer, 2 also gradients, 3 also
            parameters.
        schedule: Order of the micro-batches in the pipeline: ``"gpipe"``, ``"1f1b"`` or ``"interleaved_1f1b"``.
        virtual_stages: Chunks of the model per pipeline rank, for ``"interleaved_1f1b"``: divides the bubble by as
            much, and multiplies the messages between stages.
        num_micro_batches: Pieces that each replica's batch is cut into. By default 4 per pipeline stage, 1 without a
            pipeline, and never more than samples.
        micro_batch_size: Samples in a piece, instead of ``num_micro_batches``.
        pipeline_blocks: Name of the list of repeated layers, such as ``"model.layers"``, or names of several lists
            that form a chain. ``"auto"`` takes the list with the most parameters.
        pipeline_split: How blocks are shared out over chunks: ``"flops"``, ``"profile"`` (measured), ``"parameters"``,
            ``"uniform"``, or the number of blocks of every chunk, such as ``[3, 4]``.
        tp_plan: ``"auto"``, or patterns of layer names with how each is cut: ``"colwise"``, ``"rowwise"``,
            ``"vocab"``, ``"replicate"`` or ``"colwise:3"`` (three matrices packed in one).
        sequence_parallel: Cut activations between tensor-parallel layers along the sequence.
        loss_parallel: Leave logits cut over the vocabulary and compute the cross entropy on the pieces.
        activation_checkpointing: ``None``, ``"full"`` (compute every block again in the backward), or k for every
            k-th block.
        compile: Compile the blocks, one by one, with ``torch.compile``; a string such as ``"aot_eager"`` names its
            backend, which is ``"inductor"`` for ``True``.
        reduce_dtype: Type in which gradients are summed over replicas, such as ``"float32"`` (the default).
        global_batch_size: Samples per optimizer step over all replicas and accumulated batches; sets the batch size
            of the training loader.
        nonfinite: What a NaN or infinite gradient does: ``"continue"``, ``"skip"`` the optimizer step, or
            ``"raise"``; one decision for all ranks.
        sanity_checks: Optimizer steps between checks that replicas, tied weights, weights that tensor-parallel ranks
            share, and the batch within a replica are equal to the bit. By default before the first step of a run, fresh
            or resumed; 0 is never. A difference is a ``SanityError`` with names and ranks.
        hang_timeout_s: Seconds without progress after which the rank that hangs is found, named with its place, action
            and stack, and the job is ended. Longer than the longest step, save or compilation; by default off.
        debug_collectives: Keep what every rank has sent (torch's flight recorder), and put it into the folder
            ``flight_recorder`` of the log folder when a run hangs (needs ``hang_timeout_s``); ``"detail"`` also
            compares every collective among its ranks, which is slow.
        async_save: Write checkpoints from a thread while training goes on: a step waits only for the copy to host
            memory. At most one is under way (the next save waits for it), and its failure is raised at a later step on
            all ranks.
        elastic: Take sizes as wishes for the full world, and fit them to the ranks that torchrun has started.
        preemption_grace_s: Seconds that SIGTERM leaves for the running step and a save; by default no limit.
        loss_reduction: ``"mean"`` if the loss is a mean over the samples of its batch, ``"sum"`` if it is a sum.
        allow_tp_across_nodes: Accept tensor parallelism wider than a node.
        start_method: How local processes start: ``"popen"`` (the default: the script runs again in every process),
            ``"fork"``, ``"forkserver"`` or ``"spawn"``.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default what fits the device.
        timeout_s: Seconds after which a collective that does not complete ends the run.
        wait_timeout_s: Seconds that ranks wait for one that works alone, as rank 0 may in a save or a hook before a
            barrier; then a message says which rank is slow, and at what.
        accelerator, parallel_devices, precision_plugin: Set by the Trainer.
        cluster_environment: How ranks find each other; by default detected (torchrun, SLURM, or this machine alone).

    Raises:
        ConfigError: If the options cannot work together, or do not fit the devices of the Trainer.
    """

    strategy_name = "3d"

    def __init__(
        self,
        tensor_parallel: Size = "auto",
        pipeline_parallel: Size = "auto",
        data_parallel: Size = "auto",
        zero_stage: int = 1,
        schedule: str = "1f1b",
        virtual_stages: int = 1,
        num_micro_batches: int | None = None,
        micro_batch_size: int | None = None,
        pipeline_blocks: str | list[str] = "auto",
        pipeline_split: str | list[int] = "flops",
        tp_plan: str | dict[str, str] = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        activation_checkpointing: int | str | None = None,
        compile: bool | str = False,
        reduce_dtype: str | None = None,
        global_batch_size: int | None = None,
        nonfinite: str = "continue",
        sanity_checks: int | None = None,
        hang_timeout_s: float | None = None,
        debug_collectives: bool | str = False,
        async_save: bool = False,
        elastic: bool = False,
        preemption_grace_s: float | None = None,
        loss_reduction: str = "mean",
        allow_tp_across_nodes: bool = False,
        start_method: str | None = None,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
        wait_timeout_s: float = 7200.0,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.config = ParallelConfig(
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            data_parallel=data_parallel,
            zero_stage=zero_stage,
            schedule=schedule,
            virtual_stages=virtual_stages,
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            pipeline_blocks=pipeline_blocks,
            pipeline_split=pipeline_split,
            tp_plan=tp_plan,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            reduce_dtype=reduce_dtype,
            global_batch_size=global_batch_size,
            nonfinite=nonfinite,
            sanity_checks=sanity_checks,
            hang_timeout_s=hang_timeout_s,
            async_save=async_save,
            elastic=elastic,
            preemption_grace_s=preemption_grace_s,
            loss_reduction=loss_reduction,
            allow_tp_across_nodes=allow_tp_across_nodes,
            start_method=start_method,
        )
        Compiler.of_option(compile)  # refuses unknown backends
        super().__init__(accelerator, parallel_devices, cluster_environment, None, precision_plugin)
        self.num_nodes = 1
        check_launch(process_group_backend, timeout_s, wait_timeout_s, cluster_environment)
        self._process_group_backend = process_group_backend
        self._timeout = timedelta(seconds=timeout_s)
        self._patience = timedelta(seconds=wait_timeout_s)
        self.guard = FailureGuard()
        self.events = EventSource()
        self.progress = Progress()
        self._recorder = FlightRecorder(debug_collectives)
        self._watchdog = Watchdog(self.guard, self.progress, hang_timeout_s, self._recorder)
        self._ranges: Ranges | None = None
        self._preemption = Preemption(self.guard, preemption_grace_s)
        self._chooses = False
        self._mesh_of_one: DeviceMesh | None = None
        self._clipping: TorchClipping | None = None
        self._hook_logs: HookLogs | None = None
        self._served = ServedCallbacks()

    # --- who and where ---------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> DeviceMesh:
        """Torch's ``DeviceMesh`` with the axes ``"pp"``, ``"dp"`` and ``"tp"``.

        Raises:
            ConfigError: Before the ``setup`` hook, where there is no mesh.
        """
        topology = self.topology
        if topology.device_mesh is not None:
            return topology.device_mesh
        if self._mesh_of_one is None:
            if not _distributed_is_initialized():
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            alone = torch.zeros(1, 1, 1, dtype=torch.int)
            self._mesh_of_one = DeviceMesh(topology.device.type, alone, mesh_dim_names=AXES)
        return self._mesh_of_one

    @property
    def layout(self) -> Layout:
        """Resolved sizes, schedule, chunks, and the blocks of every stage; ``str`` of it is what rank 0 prints.

        Raises:
            ConfigError: Before the ``on_fit_start`` hook, where the module is not laid out.
        """
        return self._assembled.layout

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank; Lightning asks before it syncs metrics."""
        return self.num_nodes * self.num_processes > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.topology.dp.size, "rank": self.topology.dp.rank}

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else ThreeDPrecision("32-true")

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else ThreeDPrecision.from_stock(precision_plugin)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment which rank this process is; called by the Trainer."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # --- set-up ----------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        fit_to_world(self)
        world = self.num_nodes * self.num_processes
        self._chooses = has_choice(self.config, world)
        is_free = self._chooses and self.config.virtual_stages == 1
        if not is_free or not possible(self.config, world, self.num_processes):
            self.config.sizes(world, self.num_processes)
        if world > 1:
            check_plugins(self._layer_sync, self._checkpoint_io)
        self._launcher = make_launcher(
            self,
            self.cluster_environment,
            self.config.start_method,
            self.guard,
            self._where,
            self.check_before_launch,
        )
        if self.config.pipeline_parallel != "auto":
            self._tell_of_bubble(self.config.pipeline_parallel)

    def _where(self, local_rank: int) -> str:
        """Names a rank of this node with its place on the mesh."""
        sizes = self.config.sizes(self.num_nodes * self.num_processes, self.num_processes)
        return Where(self.node_rank * self.num_processes, sizes)(local_rank)

    def _tell_of_bubble(self, stages: int) -> None:
        if (count := self.config.num_micro_batches) and (message := bubble_warning(self.config, stages, count)):
            rank_zero_info(message)

    def _chosen(self, trainer: pl.Trainer | None, data: Sequence[object]) -> ParallelConfig:
        """The options with sizes in the place of ``"auto"``; rank 0 prints why, the first time."""
        module = self.lightning_module
        if module is None or not has_choice(self.config, self.num_nodes * self.num_processes):
            return self.config
        return choose_here(self, module, trainer, data)

    def check_before_launch(self, trainer: pl.Trainer | None = None, given: Sequence[object] = ()) -> None:
        """Choose sizes and refuse a module that cannot be laid out, while there is one process.

        The launcher calls it with the Trainer and what the user has given to it, data among it.

        Raises:
            ConfigError, PlanError, StageError: naming what cannot work.
        """
        if self.lightning_module is not None:
            before, self.config = self.config, self._chosen(trainer, given)
            sizes = self.config.sizes(self.num_nodes * self.num_processes, self.num_processes)
            if self.config is before or sizes.tp == sizes.pp == 1:  # what is chosen with more has been looked at
                check_module(self.lightning_module, self.config, sizes)

    @override
    def setup_environment(self) -> None:
        # Lightning's own use of an old name of torch's, at every optimizer step of every rank.
        warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
        super().setup_environment()
        if self._mesh is not None:
            self._watch(self._mesh)
            return
        self.set_world_ranks()
        if self.world_size > 1:
            backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
            device_id = self.root_device if backend == "nccl" else None  # gloo has nothing to open on a device
            assert self.cluster_environment is not None
            self._recorder.prepare(self._default_root())
            _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device_id)
        if self._chooses:
            trainer = None if self.lightning_module is None else self.lightning_module._trainer
            data = (getattr(trainer, "datamodule", None),)
            self.config = agree(self.config, lambda: self._chosen(trainer, data))
        sizes = self.config.sizes(self.world_size, self.num_processes)
        self._mesh = self._mesh_of_earlier(sizes) or self._new_mesh(sizes)
        if self.config.async_save:
            self._saving.background = BackgroundSaves(self._mesh, side_mesh(self._mesh, self._patience))
        # Not a fresh seed, as DDP has it: one process would go on from the state that building the module has left.
        share_random_state(self._mesh)
        self._watch(self._mesh)

    def _new_mesh(self, sizes: Sizes) -> Mesh:
        if self.root_device.type == "cuda":
            self.events.use(DeviceClock())
        return build_mesh(sizes, self.root_device, self._patience, self.events)

    def _mesh_of_earlier(self, sizes: Sizes) -> Mesh | None:
        """The mesh that an earlier Trainer laid the module out on: its parameters and messages belong to those groups.

        So do the timings of its engine: from here on they are this strategy's.
        """
        held = None if self.lightning_module is None else Assembly.of(self.lightning_module)
        if held is None or (held.topology.sizes, held.topology.device) != (sizes, self.root_device):
            return None  # refused when the module is laid out
        self.events = held.topology.events
        return held.topology

    def _default_root(self) -> str:
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return trainer.default_root_dir if trainer is not None else os.getcwd()

    def _watch(self, mesh: Mesh) -> None:
        self.guard.start(mesh)
        self._watchdog.start(mesh)
        self._served.before_setup(self.lightning_module, mesh, self.guard)

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        with nullcontext() if self._mesh is None else start_small(self._mesh, self.config):
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self._ledger = BatchLedger(self.topology.dp.size)
        stopping = self._preemption.install(trainer, self.topology)
        self._gate = LoaderGate(trainer, self.topology, self._ledger, self.config, stopping)
        self._precision.attach(self.topology, self.config)
        self._precision.on_batch = self._ledger.take
        self._served.before_layout(trainer, module, self.topology, whole=Assembly.of(module) is None)
        if self._assembly is None or self._assembly.stage.module is not module:
            self._assembly = assemble(module, self.config, self.topology, self._precision)
            self._assembly.engine.progress = self.progress
            self._mesh = self._assembly.topology
            WholeValues(module, self._model_state, self.topology).install()
            rank_zero_info(str(self._assembly.layout))
            if self.topology.tp.size > 1:
                rank_zero_info(str(self._assembly.plan))
        self.model = module
        self._saving.install(trainer)
        if self.topology.world.size > 1:
            self._served.install(trainer, module, self._model_state, self.topology, self._ledger)
        self._precision.owned = self._assembly.sharding.owned
        self._predictions = PredictionGate(trainer, self.topology, self._ledger)
        self._runner = StepRunner(
            trainer, module, self._assembly, self.config, self.topology, self._precision, self._ledger
        )
        self._sanity = SanityChecks(module, self._assembly.sharding, self.topology, self.config.sanity_checks)
        self._hook_logs = HookLogs(trainer, module, self.topology, self._ledger)
        self._hook_logs.install()
        if self.topology.world.size > 1:
            # What is gathered in evaluation is used in training, so evaluation runs under `no_grad`.
            loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
            for loop in (*loops, trainer.predict_loop):
                loop.inference_mode = False
        follow_one_clock(trainer, self.topology)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._clipping = TorchClipping(self.topology, self._assembly.sharding.owned)
            self._clipping.install()
        self.setup_precision_plugin()
        self._ranges = name_spans_for(trainer, self.events, self.topology)
        if self._recorder:
            self._recorder.use(trainer.log_dir)  # asks rank 0, so every rank must get here
        self.barrier()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.config, self.topology.sizes)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._assembled.current_parameter(parameter) for parameter in group["params"]]
        tell_schedulers(self.lr_scheduler_configs, trainer, self.config, self.topology)

    @override
    def model_to_device(self) -> None:
        """Nothing to do: ``assemble`` moves what this rank holds."""

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None and self.accelerator is not None
        for installed in (self._clipping, self._hook_logs):
            if installed is not None:
                installed.remove()
        if not self.guard.has_failed:
            self.finish_saving()
        self._saving.remove()
        self._served.remove()
        if self._ranges is not None:
            self._ranges.remove()
        self.events.abandon()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._watchdog.stop()
        self.guard.stop()
        self._preemption.remove()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._preemption.handles(exception):
            return
        # Before the others hear of it: they take part in the save until then.
        longest = min(_LAST_SAVE_S, self._patience.total_seconds())
        self._give_up_saving(_LAST_CHANCE_S if self.guard.has_failed else longest)
        self.guard.failed(exception)
