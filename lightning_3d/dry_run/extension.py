"""From a few micro-batches to all of them: what a step of 1F1B holds when most of it is not run.

In the backward of micro-batch ``j``, and in the forward before it, a stage that runs ``ahead`` forwards before its
first backward holds

    fixed + ahead * kept + messages + j * left + micro_batches * batch

with what a micro-batch keeps for its backward, what it leaves for good (its loss), and the batch. Messages are those
that the engine has sent and holds on to: as many as were sent, up to a bound; none where it is known when they have
arrived. Two short steps tell all of it. The last forward and backward before the pipeline empties, or those before,
hold the fullest moment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_3d.dry_run.allocations import Peak
from lightning_3d.dry_run.record import Record, UnlikeError
from lightning_3d.schedules import Action, Kind, build

MARGIN = 4
"""Micro-batches of a short step beyond those that run ahead: the first makes gradients, two are alike, one is last."""


@dataclass(frozen=True)
class ShortStep:
    """A step of few micro-batches."""

    ahead: int
    """Forwards before the first backward."""
    record: Record
    """Its work is that of the whole step, its memory what was seen."""
    tail: tuple[Peak, ...]
    """The last three turns (a forward and a backward) of the steady state, from the last one back."""
    batch_bytes: int
    """Of one micro-batch's part of the batch."""
    activation_bytes: int
    """Of what a micro-batch sends to the next stage; 0 on the last."""
    gradient_bytes: int
    """Of what it sends to the stage before; 0 on the first."""

    def messages(self, ahead: int, turn: int, when: str, bound: int) -> tuple[int, int]:
        """Bytes of activations and of gradients that are under way in a turn of a step with so many forwards ahead.

        Args:
            ahead: Forwards before the first backward.
            turn: Number of the backward.
            when: Whether it, or the forward before it, runs: an action's name.
            bound: Messages that are held at most: the latest ones.
        """
        is_backward = when.startswith("B")
        activations = (ahead + turn + is_backward) * (self.activation_bytes > 0)
        gradients = turn * (self.gradient_bytes > 0)
        held = min(bound, activations + gradients)
        back = min(gradients, held if not activations else (held + (not is_backward)) // 2)  # they take turns
        return (held - back) * self.activation_bytes, back * self.gradient_bytes


def actions_ahead(stage: int, stages: int, ahead: int, micro_batches: int) -> list[Action]:
    """What ``stage`` does in 1F1B, with ``ahead`` forwards before its first backward: as a stage further down does."""
    other = stages - 1 - ahead
    found = []
    for action in build("1f1b", stages, 1, micro_batches).actions[other]:
        if stage == 0 and action.kind in (Kind.RECV_F, Kind.SEND_B):
            continue
        peer = action.peer + stage - other if action.peer >= 0 else action.peer
        found.append(action._replace(chunk=stage, peer=peer))
    return found


def extended(low: ShortStep, high: ShortStep | None, ahead: int, bound: int) -> Record:
    """The record of the whole step.

    Args:
        low: A short step.
        high: One with one more micro-batch ahead, and in all; needed unless ``low`` runs ``ahead``.
        ahead: Forwards before the first backward in the whole step.
        bound: Messages that the engine holds on to.

    Raises:
        UnlikeError: if what was seen does not grow as it should, so that all micro-batches have to be run.
    """
    record = low.record
    count, run = record.micro_batches, record.micro_batches_run
    bare = _without_messages(low, bound)
    left = bare[1].total - bare[2].total
    if left < 0 or record.pipeline.total != max(peak.total for peak in low.tail):
        raise UnlikeError
    tail, batch = bare[:2], (count - run) * low.batch_bytes
    outside = with_batch(record.outside, batch)
    if high is not None and ahead > low.ahead:
        if high.record.work != record.work:
            raise UnlikeError
        tail = tuple(
            _line(*pair, ahead - low.ahead) for pair in zip(tail, _without_messages(high, bound), strict=False)
        )
        batch -= (ahead - low.ahead) * low.batch_bytes  # it is in the line
    last, seen = count - 1 - ahead, run - 1 - low.ahead
    whole = []
    for back, peak in enumerate(tail):
        grown = _with(peak, "logits" if ahead == 0 else "activations", (last - seen) * left)
        whole.append(_with_messages(with_batch(grown, batch), low, ahead, last - back, bound))
    return replace(record, pipeline=max(reversed(whole), key=lambda peak: peak.total), outside=outside)


def with_batch(peak: Peak, num_bytes: int) -> Peak:
    """``peak`` with so much more of the batch."""
    return _with(peak, "activations", num_bytes)


def _without_messages(step: ShortStep, bound: int) -> tuple[Peak, ...]:
    last = step.record.micro_batches_run - 1 - step.ahead
    found = []
    for back, peak in enumerate(step.tail):
        activations, gradients = step.messages(step.ahead, last - back, peak.when, bound)
        found.append(_with(_with(peak, "activations", -activations), "communication", -gradients))
    return tuple(found)


def _with_messages(peak: Peak, step: ShortStep, ahead: int, turn: int, bound: int) -> Peak:
    activations, gradients = step.messages(ahead, turn, peak.when, bound)
    found = _with(_with(peak, "activations", activations), "communication", gradients)
    return replace(found, when=f"{peak.when.partition('.')[0]}.{turn}")


def _with(peak: Peak, kind: str, num_bytes: int) -> Peak:
    kinds = {**peak.by_kind, kind: peak.by_kind.get(kind, 0) + num_bytes}
    return Peak(peak.total + num_bytes, peak.when, kinds)


def _line(low: Peak, high: Peak, steps: int) -> Peak:
    kinds = {kind: size + steps * (high.by_kind[kind] - size) for kind, size in low.by_kind.items()}
    return Peak(low.total + steps * (high.total - low.total), low.when, kinds)
