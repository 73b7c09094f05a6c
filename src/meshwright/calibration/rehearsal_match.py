"""Whether a rehearsal is of the step that ran: refused, told in a note, or taken as it is.

Times of other arguments or of another number of devices mean nothing beside the measured ones.
Another chip, mesh or name may be meant, and a note says what was rehearsed.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from meshwright._text import plural
from meshwright.errors import CalibrationError, listing
from meshwright.rehearsal.pipelines import PipelineRehearsal
from meshwright.rehearsal.result import Rehearsal

_NOTE = "Rehearsed was "


def refuse_rehearsal(rehearsal: Rehearsal, devices: int, arguments: Sequence[str]) -> None:
    """Refuse the rehearsal of a step with other arguments, or on another number of devices."""
    rehearsed = rehearsal.placement.positions.size
    again = "Rehearse this step: mw.rehearse(step, *args, mesh=mesh)."
    _refuse_devices(_what(rehearsal), rehearsed, devices, again)
    _refuse_arguments(_what(rehearsal), rehearsal.array_types, arguments, again)


def refuse_pipeline_rehearsal(
    rehearsal: PipelineRehearsal,
    groups: Sequence[int],
    microbatches: int,
    arguments: Sequence[str],
) -> None:
    """Refuse the rehearsal of a pipeline with other groups, microbatches or arguments.

    `groups` are their numbers of devices.
    """
    again = "Rehearse this one: mw.rehearse_pipeline(step, *args)."
    if rehearsal.group_sizes != tuple(groups):
        raise CalibrationError(
            f"rehearsal: of {rehearsal.name} on {_groups_text(rehearsal.group_sizes)}, and the "
            f"step runs on {_groups_text(groups)}. {again}",
            option="rehearsal",
        )
    rehearsed = rehearsal.timeline and rehearsal.timeline.schedule.microbatches
    if rehearsed not in (None, microbatches):
        raise CalibrationError(
            f"rehearsal: of {rehearsal.name} in {plural(rehearsed or 0, 'microbatch')}, and the "
            f"step has {microbatches}. {again}",
            option="rehearsal",
        )
    _refuse_arguments(rehearsal.name, rehearsal.array_types, arguments, again)


def with_note(
    notes: Sequence[str], rehearsed: Sequence[str], ran: Sequence[str]
) -> tuple[str, ...]:
    """The notes of a measurement beside a rehearsal, which is named where it is of something else.

    `rehearsed` and `ran` are names, meshes and hardware.

    >>> with_note((), ("step", "dp:4", "v5e:2x2"), ("step", "dp:4", "cpu:4"))
    ('Rehearsed was step as dp:4 on v5e:2x2; step ran as dp:4 on cpu:4.',)
    """
    kept = tuple(note for note in notes if not note.startswith(_NOTE))
    if tuple(rehearsed) == tuple(ran):
        return kept
    first, second = ((name, f"as {mesh} on {on}") for name, mesh, on in (rehearsed, ran))
    return (*kept, f"{_NOTE}{' '.join(first)}; {second[0]} ran {second[1]}.")


def _what(rehearsal: Rehearsal) -> str:
    return f"{rehearsal.name} as {rehearsal.placement.spec} on {rehearsal.placement.topology.name}"


def _groups_text(groups: Sequence[int]) -> str:
    sizes = plural(groups[0], "device") if len(set(groups)) == 1 else f"{listing(groups)} devices"
    return f"{plural(len(groups), 'group')} of {sizes}"


def _refuse_devices(what: str, rehearsed: int, ran: int, again: str) -> None:
    if rehearsed != ran:
        raise CalibrationError(
            f"rehearsal: of {what}, {plural(rehearsed, 'device')}, and the step runs on {ran}. "
            f"{again}",
            option="rehearsal",
        )


def _refuse_arguments(what: str, rehearsed: Sequence[str], ran: Sequence[str], again: str) -> None:
    first, second = collections.Counter(rehearsed), collections.Counter(ran)
    if first == second:
        return
    there = listing((first - second).elements(), limit=3) or "fewer arrays"
    here = listing((second - first).elements(), limit=3) or "fewer arrays"
    raise CalibrationError(
        f"rehearsal: of {what} with other arguments: {there} there, {here} here. {again}",
        option="rehearsal",
    )
