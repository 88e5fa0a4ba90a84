"""Puts the sends and receives into the compute order of a schedule: the one place that decides where they stand."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from lightning_3d.schedules.actions import Action, Kind, Schedule
from lightning_3d.schedules.simulate import simulate


def with_communication(schedule: Schedule) -> Schedule:
    """Add to a schedule of compute actions only what the ranks send and receive.

    Each send follows the action that made its data. Each receive is posted at least one compute action ahead: before
    the one that precedes its consumer, hence also before the sends of that one. Where the data is sent earlier than
    that, the receive is posted earlier too: before the last action that starts, when each F, B and W takes one tick,
    while the data is still being made. (Data that goes from the last rank back to the first one in an interleaved
    schedule is early: it waits there for its turn.) Two rules go before these: the receive of a gradient stands after
    the send of the outputs that it belongs to, which tell its shapes; and no receive is posted before one of the same
    kind, from the same rank, that is used earlier.

    Then nothing can deadlock even when each send blocks until its receive is posted, whatever the true times are: in
    tick order each receive is posted before its send, so the relation "must happen before" has no cycle. Each message
    keeps its place among those of its kind between the same two ranks if the ranks agree on the order of their actions.

    Chunks that follow each other on one rank hand over locally, without a message.
    """
    one_ahead = [[max(0, index - 1) for index in range(len(order))] for order in schedule.actions]
    spans = simulate(_insert(schedule, one_ahead), 1.0, 1.0, weight_time=1.0).spans
    starts = [[span.start for span in rank_spans] for rank_spans in spans]
    made = {action[:3]: end for rank_spans in spans for action, _, end in rank_spans}
    post_before = [list(positions) for positions in one_ahead]
    for rank, order in enumerate(schedule.actions):
        forwards = {action[1:3]: index for index, action in enumerate(order) if action.kind is Kind.F}
        posted: dict[tuple[Kind, int], int] = {}
        for index, (kind, chunk, micro_batch, _) in enumerate(order):
            source = chunk + (-1 if kind is Kind.F else 1)
            if kind is Kind.W or (sent := made.get((kind, source, micro_batch))) is None:
                continue
            during = bisect_left(starts[rank], sent) - 1
            after = forwards[chunk, micro_batch] + 1 if kind is Kind.B else 0
            channel = (kind, schedule.placement[source])
            posted[channel] = max(posted.get(channel, 0), after, min(during, index - 1))
            post_before[rank][index] = posted[channel]
    return _insert(schedule, post_before)


def _insert(schedule: Schedule, post_before: Sequence[Sequence[int]]) -> Schedule:
    """Insert all messages; the receive for action i of a rank goes before action ``post_before[rank][i]``."""
    placement, actions = schedule.placement, []
    for rank, order in enumerate(schedule.actions):
        receives: list[list[Action]] = [[] for _ in order]
        sends: list[list[Action]] = [[] for _ in order]
        for index, (kind, chunk, micro_batch, _) in enumerate(order):
            if kind is Kind.W:
                continue
            forward = kind is Kind.F
            source, target = (chunk - 1, chunk + 1) if forward else (chunk + 1, chunk - 1)
            if 0 <= source < len(placement) and placement[source] != rank:
                receive = Action(Kind.RECV_F if forward else Kind.RECV_B, chunk, micro_batch, placement[source])
                receives[post_before[rank][index]].append(receive)
            if 0 <= target < len(placement) and placement[target] != rank:
                sends[index].append(
                    Action(Kind.SEND_F if forward else Kind.SEND_B, chunk, micro_batch, placement[target])
                )
        actions.append(tuple(a for i, action in enumerate(order) for a in (*receives[i], action, *sends[i])))
    return replace(schedule, actions=tuple(actions))
