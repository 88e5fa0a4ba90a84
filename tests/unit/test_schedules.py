"""Schedules proven on paper: order, messages, deadlock, memory and bubble, and the same order as torch's own."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError
from lightning_3d.schedules import (
    ENGINE_SCHEDULES,
    SCHEDULES,
    Action,
    DeadlockError,
    Kind,
    Schedule,
    bubble_fraction,
    build,
    in_flight,
    simulate,
)
from lightning_3d.schedules.interleaved import round_sizes

Sizes = tuple[str, int, int, int]
"""name, stages, virtual_stages, micro_batches"""


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    virtual_stages = SCHEDULES[name].virtual_stages or draw(st.integers(1, 4))
    return name, draw(st.integers(1, 16)), virtual_stages, draw(st.integers(1, 32))


SMALL: list[Sizes] = [
    (name, stages, virtual_stages, micro_batches)
    for name, rule in SCHEDULES.items()
    for stages, virtual_stages, micro_batches in itertools.product((1, 2, 3, 4), (1, 2, 3), range(1, 10))
    if rule.virtual_stages in (None, virtual_stages)
]
"""Every combination of small sizes: fewer micro-batches than stages, ragged ones, one stage, one micro-batch."""


def check_computes(schedule: Schedule) -> None:
    """Each F, B and W exactly once, on the rank of its chunk, in an order that its rank can follow."""
    kinds = (Kind.F,) if schedule.forward_only else (Kind.F, Kind.B, Kind.W)
    if not SCHEDULES[schedule.name].splits_backward:
        kinds = kinds[:2]
    for rank in range(schedule.stages):
        compute = schedule.compute(rank)
        expected = itertools.product(kinds, schedule.rank_chunks(rank), range(schedule.micro_batches))
        assert Counter(action[:3] for action in compute) == Counter(expected)
        order = SCHEDULES[schedule.name].order(rank, schedule.stages, schedule.virtual_stages, schedule.micro_batches)
        assert list(compute) == [action for action in order if action.kind in kinds]
        place = {action[:3]: index for index, action in enumerate(compute)}
        for kind, chunk, micro_batch, peer in compute:
            assert peer == -1
            if kind is not Kind.F:
                before = Kind.F if kind is Kind.B else Kind.B
                assert place[before, chunk, micro_batch] < place[kind, chunk, micro_batch]


def check_messages(schedule: Schedule) -> None:
    """Exactly the messages that the placement asks for, each sent after its data is made and posted ahead of its use,
    and in one order on both sides for each (kind, source, destination).
    """
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        place = {action[:3]: index for index, action in enumerate(actions)}
        assert len(place) == len(actions)
        for index, (kind, chunk, micro_batch, peer) in enumerate(actions):
            if kind is Kind.SEND_F or kind is Kind.SEND_B:
                target = chunk + 1 if kind is Kind.SEND_F else chunk - 1
                made_by = Kind.F if kind is Kind.SEND_F else Kind.B
                assert schedule.chunk_rank(target) == peer != rank
                assert place[made_by, chunk, micro_batch] < index
                assert not any(
                    action.kind.is_compute for action in actions[place[made_by, chunk, micro_batch] + 1 : index]
                )
                sent[made_by, rank, peer].append((target, micro_batch))
            elif kind is Kind.RECV_F or kind is Kind.RECV_B:
                used_by = Kind.F if kind is Kind.RECV_F else Kind.B
                consumer = place[used_by, chunk, micro_batch]
                before = [action for action in actions[:index] if action.kind.is_compute]
                between = [action for action in actions[index:consumer] if action.kind.is_compute]
                assert index < consumer
                if kind is Kind.RECV_B:
                    assert place[Kind.SEND_F, chunk, micro_batch] < index, "posted once its shapes are known"
                    ahead = before[-1][:3] == (Kind.F, chunk, micro_batch) or between
                else:
                    ahead = between or not before
                assert ahead, "posted one compute action ahead"
                received[used_by, peer, rank].append((chunk, micro_batch))
    assert sent == received
    boundaries = sum(a != b for a, b in itertools.pairwise(schedule.placement))
    ways = 1 if schedule.forward_only else 2
    assert sum(map(len, sent.values())) == ways * boundaries * schedule.micro_batches


def check_no_deadlock(schedule: Schedule) -> None:
    """Follow the lists without any notion of time, each send waiting until its receive is posted."""
    posted: set[tuple[Kind, int, int]] = set()
    done: set[tuple[Kind, int, int]] = set()

    def may_go(action: Action) -> bool:
        kind, chunk, micro_batch, _ = action
        if kind is Kind.SEND_F:
            return (Kind.RECV_F, chunk + 1, micro_batch) in posted
        if kind is Kind.SEND_B:
            return (Kind.RECV_B, chunk - 1, micro_batch) in posted
        if kind is Kind.F and chunk > 0:
            return (Kind.F, chunk - 1, micro_batch) in done
        if kind is Kind.B and chunk < schedule.num_chunks - 1:
            return (Kind.B, chunk + 1, micro_batch) in done
        return True

    queues = [list(reversed(actions)) for actions in schedule.actions]
    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and may_go(queue[-1]):
                action = queue.pop()
                moved = True
                if action.kind.is_receive:
                    posted.add(action[:3])
                elif action.kind.is_send:
                    # The receiver's compute waits for the message, so its source counts as done only once it is sent.
                    done.add((Kind.F if action.kind is Kind.SEND_F else Kind.B, action.chunk, action.micro_batch))
                elif not _is_sent(schedule, action):
                    done.add(action[:3])
    assert not any(queues)


def _is_sent(schedule: Schedule, action: Action) -> bool:
    target = action.chunk + (1 if action.kind is Kind.F else -1)
    return 0 <= target < schedule.num_chunks and schedule.chunk_rank(target) != schedule.chunk_rank(action.chunk)


def check(schedule: Schedule) -> None:
    check_computes(schedule)
    check_messages(schedule)
    check_no_deadlock(schedule)
    simulate(schedule, blocking_sends=True)


@pytest.mark.parametrize("forward_only", [False, True])
def test_every_small_schedule_is_complete_paired_and_free_of_deadlock(forward_only: bool) -> None:
    for case in SMALL:
        check(build(*case, forward_only))


@settings(max_examples=80, deadline=None)
@given(sizes(), st.booleans())
@example(("interleaved_1f1b", 16, 4, 31), False)
@example(("interleaved_1f1b", 16, 4, 32), False)
def test_any_schedule_is_complete_paired_and_free_of_deadlock(case: Sizes, forward_only: bool) -> None:
    check(build(*case, forward_only))


@settings(max_examples=60, deadline=None)
@given(sizes(), st.sampled_from([(1.0, 2.0), (1.0, 1.0), (3.0, 1.0)]))
def test_simulated_memory_and_bubble_are_the_formulas(case: Sizes, times: tuple[float, float]) -> None:
    name, stages, virtual_stages, micro_batches = case
    weight_time = 0.0
    if SCHEDULES[name].splits_backward:
        times, weight_time = (1.0, 1.0), 1.0
    timeline = simulate(build(*case), *times, weight_time=weight_time)
    assert timeline.peak_live == in_flight(*case)
    assert timeline.bubble_fraction == pytest.approx(bubble_fraction(*case), abs=1e-12)
    assert timeline.busy == pytest.approx([(sum(times) + weight_time) * virtual_stages * micro_batches] * stages)
    assert timeline.idle == pytest.approx([timeline.total - timeline.busy[0]] * stages)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 1), (4, 3), (4, 8), (16, 5), (16, 32)])
def test_published_formulas_of_memory_and_bubble(stages: int, micro_batches: int) -> None:
    p, m = stages, micro_batches
    assert in_flight("gpipe", p, 1, m) == (m,) * p
    assert in_flight("1f1b", p, 1, m) == tuple(min(m, p - i) for i in range(p))
    for name in ("gpipe", "1f1b"):
        assert bubble_fraction(name, p, 1, m) == pytest.approx((p - 1) / (m + p - 1))
    for v, full in itertools.product((1, 2, 4), (p, 2 * p, 8 * p)):
        assert bubble_fraction("interleaved_1f1b", p, v, full) == pytest.approx((p - 1) / (v * full + p - 1))
        expected = tuple(min(full * v, 2 * (p - i - 1) + (v - 1) * p + 1) for i in range(p))
        assert in_flight("interleaved_1f1b", p, v, full) == expected
    assert bubble_fraction("1f1b", 24, 1, 8) == pytest.approx(23 / 31)


@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 24), (16, 40)])
def test_zero_bubble_schedules_wait_as_published(p: int, m: int) -> None:
    """Table 1 of Qi et al. 2024, for any times with W shorter than F and B."""
    for forward, backward, weight in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.3, 0.9), (1.0, 2.0, 0.5)):
        h1 = simulate(build("zb_h1", p, 1, m), forward, backward, weight_time=weight)
        assert h1.idle == pytest.approx([(p - 1) * (forward + backward - weight)] * p)
        whole = simulate(build("1f1b", p, 1, m), forward, backward + weight)
        assert whole.idle == pytest.approx([(p - 1) * (forward + backward + weight)] * p)
        assert max(h1.peak_live) == max(whole.peak_live) == p
    v = simulate(build("zbv", p, 2, m), 1.0, 1.0, weight_time=1.0)
    assert v.idle == pytest.approx([p - 1] * p) and set(v.peak_live) == {2 * p}
    for rank, spans in enumerate(v.spans):
        assert (spans[0].start, spans[-1].end) == (rank, v.total - (p - 1) + rank), "none waits once it has begun"
    assert bubble_fraction("zbv", p, 2, m) < bubble_fraction("zb_h1", p, 1, m) < bubble_fraction("1f1b", p, 1, m)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 5), (4, 4, 11), (8, 2, 23), (16, 4, 17)])
def test_a_ragged_interleaved_step_loses_no_time(p: int, v: int, m: int) -> None:
    assert m % p
    timeline = simulate(build("interleaved_1f1b", p, v, m))
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1))
    assert sum(round_sizes(p, m)) == m and min(round_sizes(p, m)) >= p
    assert max(timeline.peak_live) <= 2 * (p - 1) + (v - 1) * (2 * p - 1) + 1


def test_evaluation_is_the_training_order_without_backward() -> None:
    for case in SMALL:
        training, evaluation = build(*case), build(*case, forward_only=True)
        for rank in range(training.stages):
            forwards = tuple(action for action in training.compute(rank) if action.kind is Kind.F)
            assert evaluation.compute(rank) == forwards
        assert set(simulate(evaluation).peak_live) == {1}
        if case[3] >= case[1] and case[0] != "zbv":
            turns = case[2] * case[3] + case[1] - 1
            assert simulate(evaluation).total == turns


# The oracle: torch's own schedules, run over stages that only write down what they are asked to do.


class _RecordingStage:
    """What torch's schedules ask of a stage, without modules, process groups or messages."""

    has_backward = True

    def __init__(self, index: int, stages: int, chunks: int) -> None:
        self.stage_index, self.num_stages = index, chunks
        self.group_size, self.group_rank = stages, index % stages
        self.is_first, self.is_last = index == 0, index == chunks - 1
        self.done: list[tuple[Kind, int, int]] = []

    def forward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self.done.append((Kind.F, self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, **kwargs: Any) -> None:
        self.done.append((Kind.B, self.stage_index, micro_batch))

    def get_fwd_recv_ops(self, micro_batch: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, scale: int) -> None:
        pass


def torch_single_order(cls: Any, stages: int, micro_batches: int, rank: int) -> list[tuple[Kind, int, int]]:
    """Run a step of a torch schedule with one stage per rank. Not its printed ``pipeline_order``: that of torch 2.13
    begins with micro-batch 1 on the last rank of 1F1B.
    """
    stage = _RecordingStage(rank, stages, stages)
    schedule = cls(stage, max(stages, micro_batches))
    schedule._n_microbatches = micro_batches  # its constructor refuses fewer than stages, its step does not
    schedule._initialize_stage = lambda *args, **kwargs: None
    schedule._step_microbatches()
    return stage.done


@pytest.mark.parametrize(("name", "oracle"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
def test_order_is_that_of_torch_with_one_chunk_per_rank(name: str, oracle: Any) -> None:
    for stages, micro_batches in itertools.product((1, 2, 3, 4, 7, 16), (1, 2, 3, 4, 5, 8, 15, 16, 32)):
        schedule = build(name, stages, 1, micro_batches)
        for rank in range(stages):
            ours = [action[:3] for action in schedule.compute(rank)]
            assert ours == torch_single_order(oracle, stages, micro_batches, rank), (stages, micro_batches, rank)


def test_order_is_that_of_torch_with_several_chunks_per_rank() -> None:
    names = {"FORWARD": Kind.F, "FULL_BACKWARD": Kind.B}
    compared = ragged = 0
    for stages, virtual_stages, micro_batches in itertools.product((1, 2, 3, 4, 8, 16), (1, 2, 3, 4), range(1, 33)):
        if micro_batches % max(1, micro_batches // stages):
            continue  # torch refuses rounds of unequal length
        for rank in sorted({0, stages // 2, stages - 1}):
            ours = SCHEDULES["interleaved_1f1b"].order(rank, stages, virtual_stages, micro_batches)
            oracle = SimpleNamespace(
                n_local_stages=virtual_stages,
                pp_group_size=stages,
                _n_microbatches=micro_batches,
                microbatches_per_round=micro_batches // max(1, micro_batches // stages),
            )
            theirs = ScheduleInterleaved1F1B._calculate_single_rank_operations(oracle, rank)  # type: ignore[arg-type]
            assert [
                (action.stage_index, names[action.computation_type.name], action.microbatch_index)
                for action in theirs
                if action
            ] == [(chunk, kind, micro_batch) for kind, chunk, micro_batch, _ in ours]
        compared += 1
        ragged += micro_batches % stages != 0
    assert compared > 300 and ragged > 100


def test_order_is_that_of_a_whole_torch_interleaved_schedule() -> None:
    stages = [_RecordingStage(chunk, 4, 8) for chunk in (1, 5)]
    oracle = ScheduleInterleaved1F1B(stages, 10, loss_fn=lambda *_: None)  # type: ignore[arg-type]
    schedule = build("interleaved_1f1b", 4, 2, 10)
    for rank in range(4):
        theirs = [str(action) for action in oracle.pipeline_order[rank] if action]
        assert theirs == [f"{a.chunk}{a.kind.value}{a.micro_batch}" for a in schedule.compute(rank)]


def torch_zero_bubble_order(name: str, stages: int, micro_batches: int, rank: int) -> list[tuple[Kind, int, int]]:
    rounds = max(1, micro_batches // stages)
    oracle = SimpleNamespace(
        n_local_stages=1,
        num_stages=2 * stages,
        pp_group_size=stages,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )
    cls = ScheduleZBVZeroBubble if name == "zbv" else ScheduleInterleavedZeroBubble
    kinds = {"FORWARD": Kind.F, "BACKWARD_INPUT": Kind.B, "BACKWARD_WEIGHT": Kind.W}
    actions = cls._calculate_single_rank_operations(oracle, rank)  # type: ignore[arg-type]
    return [(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in actions if a]


def test_order_is_that_of_torch_with_split_backwards() -> None:
    for stages, micro_batches in itertools.product((1, 2, 3, 4, 7, 8, 16), (1, 2, 3, 4, 5, 8, 15, 16, 31, 32)):
        for name in ("zb_h1", "zbv"):
            if name == "zb_h1" and micro_batches < stages:
                continue  # torch's warm-up counts no further than the last rank's, and refuses such sizes
            schedule = build(name, stages, SCHEDULES[name].virtual_stages or 1, micro_batches)
            for rank in range(stages):
                ours = [action[:3] for action in schedule.compute(rank)]
                assert ours == torch_zero_bubble_order(name, stages, micro_batches, rank), (name, stages, micro_batches)


def test_schedules_without_an_engine_are_refused_by_the_strategy_before_anything_starts() -> None:
    assert ENGINE_SCHEDULES == ("gpipe", "1f1b", "interleaved_1f1b")
    for name in ("zb_h1", "zbv"):
        with pytest.raises(
            ConfigError, match=rf"'{name}' can be simulated and planned.*not trained.*'interleaved_1f1b'"
        ):
            ParallelConfig(schedule=name, virtual_stages=SCHEDULES[name].virtual_stages or 1)
    with pytest.raises(ConfigError, match=r"'2f2b' is not known\. Choose from 'gpipe', '1f1b', 'interleaved_1f1b'\."):
        ParallelConfig(schedule="2f2b")
    with pytest.raises(ConfigError, match="is not known"):
        ParallelConfig(schedule=["1f1b"])  # type: ignore[arg-type]


# The prover itself: it must see what is wrong.


def test_receives_posted_only_when_needed_deadlock_when_sends_block() -> None:
    schedule = build("1f1b", 2, 1, 4)
    late = []
    for actions in schedule.actions:
        order: list[Action] = []
        for action in actions:
            if action.kind.is_compute:
                kind = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
                order += [a for a in actions if a[:3] == (kind, action.chunk, action.micro_batch)]
            if not action.kind.is_receive:
                order.append(action)
        late.append(tuple(order))
    broken = replace(schedule, actions=tuple(late))
    assert simulate(broken).total == simulate(schedule).total
    with pytest.raises(DeadlockError, match=r"rank 0 at SF0.*rank 1 at SB"):
        simulate(broken, blocking_sends=True)
    with pytest.raises(AssertionError):
        check_no_deadlock(broken)


def _edited(schedule: Schedule, rank: int, edit: Any) -> Schedule:
    lists = list(schedule.actions)
    lists[rank] = tuple(edit(list(lists[rank])))
    return replace(schedule, actions=tuple(lists))


def test_simulation_refuses_lost_swapped_and_impossible_actions() -> None:
    schedule = build("1f1b", 2, 1, 3)
    sends = [index for index, action in enumerate(schedule.actions[0]) if action.kind is Kind.SEND_F]

    def swap(actions: list[Action], a: int, b: int) -> list[Action]:
        actions[a], actions[b] = actions[b], actions[a]
        return actions

    with pytest.raises(DeadlockError, match="meets the receive"):
        simulate(_edited(schedule, 0, lambda actions: swap(actions, sends[0], sends[1])))
    for kind in (Kind.SEND_F, Kind.RECV_B):
        lost = _edited(schedule, 0, lambda actions, kind=kind: [a for a in actions if a.kind is not kind])
        with pytest.raises(DeadlockError):
            simulate(lost)
    unused = _edited(schedule, 0, lambda actions: [*actions, Action(Kind.RECV_B, 0, 9, 1)])
    with pytest.raises(DeadlockError, match="without send or receive"):
        simulate(unused)
    with pytest.raises(DeadlockError, match=r"rank 1 at B1\.0"):
        simulate(_edited(schedule, 1, lambda actions: sorted(actions, key=lambda a: a.kind is Kind.F)))


def test_simulation_places_actions_and_messages_in_time() -> None:
    timeline = simulate(build("1f1b", 2, 1, 2), forward_time=[1.0, 2.0], backward_time=[2.0, 4.0], send_time=0.5)
    spans = [[(str(span.action), span.start, span.end) for span in rank] for rank in timeline.spans]
    assert spans == [
        [("F0.0", 0.0, 1.0), ("F0.1", 1.0, 2.0), ("B0.0", 8.0, 10.0), ("B0.1", 14.0, 16.0)],
        [("F1.0", 1.5, 3.5), ("B1.0", 3.5, 7.5), ("F1.1", 7.5, 9.5), ("B1.1", 9.5, 13.5)],
    ]
    assert timeline.total == 16.0 and timeline.busy == (6.0, 12.0) and timeline.idle == (10.0, 4.0)
    assert timeline.bubble_fraction == pytest.approx(14 / 32)
    messages = sorted((message.start, message.end, message.kind.value, *message[1:5]) for message in timeline.messages)
    assert messages == [
        (1.0, 1.5, "F", 1, 0, 0, 1),
        (2.0, 2.5, "F", 1, 1, 0, 1),
        (7.5, 8.0, "B", 0, 0, 1, 0),
        (13.5, 14.0, "B", 0, 1, 1, 0),
    ]


def test_a_weight_action_holds_the_activation_until_it_has_run() -> None:
    compute = [Action(Kind.F, 0, 0), Action(Kind.F, 0, 1), Action(Kind.B, 0, 0), Action(Kind.B, 0, 1)]
    weights = [Action(Kind.W, 0, 0), Action(Kind.W, 0, 1)]
    whole = Schedule("test", 1, 1, 2, False, (0,), (tuple(compute[:1] + compute[2:3] + compute[1:2] + compute[3:]),))
    split = Schedule("test", 1, 1, 2, False, (0,), (tuple(whole.actions[0] + tuple(weights)),))
    assert simulate(whole).peak_live == (1,)
    assert simulate(split, weight_time=1.0).peak_live == (2,)
    assert simulate(split, 1.0, 1.0, weight_time=1.0).total == 6.0
    with pytest.raises(DeadlockError, match=r"rank 0 at W0\.0"):
        simulate(replace(split, actions=(tuple(weights),)))


def test_a_schedule_reads_well_and_knows_its_chunks() -> None:
    schedule = build("interleaved_1f1b", 2, 2, 2)
    assert schedule.num_chunks == 4 and schedule.rank_chunks(1) == (1, 3) and schedule.chunk_rank(2) == 0
    assert str(build("1f1b", 2, 1, 2)).splitlines() == [
        "1f1b (training): 2 stages × 1 chunks, 2 micro-batches",
        "rank 0: F0.0 SF0.0>1 RB0.0<1 F0.1 SF0.1>1 RB0.1<1 B0.0 B0.1",
        "rank 1: RF1.0<0 RF1.1<0 F1.0 B1.0 SB1.0>0 F1.1 B1.1 SB1.1>0",
    ]
    assert build("1f1b", 2, 1, 2) is build("1f1b", 2, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("2f2b", 2, 1, 2), "'2f2b' is not known.*'gpipe', '1f1b', 'interleaved_1f1b', 'zb_h1', 'zbv'"),
        (
            ("gpipe", 2, 2, 2),
            "'gpipe' runs one chunk.*virtual_stages=2.*virtual_stages=1 or schedule='interleaved_1f1b'",
        ),
        (("1f1b", 2, 3, 2), "'1f1b' runs one chunk.*virtual_stages=3"),
        (("zbv", 2, 1, 2), "'zbv' runs 2 chunks.*virtual_stages=1.*virtual_stages=2 or schedule='interleaved_1f1b'"),
        (("1f1b", 0, 1, 2), "stages=0.*1 or more"),
        (("1f1b", 2, 0, 2), "virtual_stages=0.*1 or more"),
        (("1f1b", 2, 1, 0), "micro_batches=0.*1 or more"),
    ],
)
def test_impossible_sizes_and_unknown_names_are_refused(arguments: Sizes, says: str) -> None:
    for function in (build, bubble_fraction, in_flight):
        with pytest.raises(ConfigError, match=says):
            function(*arguments)
