"""Simulated programs: timelines worked out by hand, and what holds for every program. The numbers are exact fractions."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apexfx.tools.simulate.timeline import LEGEND, Start, Wait, Work, run

any_speed = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])  # beside other work
F = Fraction


def rows(timeline, track):
    return [(event.name, event.begin, event.end) for event in timeline.track(track)]


def test_two_channels_share_the_network():
    timeline = run([Start("x", F(3)), Start("y", F(1), 1), Wait("x"), Wait("y")])
    assert rows(timeline, "communication") == [("y", 0, 2), ("x", 0, 4)]


def test_compute_and_communication_slow_each_other():
    # Half speed each: the 2 s collective needs 4 s beside compute, in which 2 s of work are done, then the rest at full speed.
    timeline = run([Start("x", F(2)), Work("a", F(3)), Wait("x")], compute_rate=F(1, 2), network_rate=F(1, 2))
    assert rows(timeline, "communication") == [("x", 0, 4)]
    assert rows(timeline, "compute") == [("a", 0, 5)]
    # While it waits, the processor is free for communication.
    timeline = run([Start("x", F(2)), Work("a", F(1)), Wait("x")], compute_rate=F(1, 2), network_rate=F(1, 2))
    assert rows(timeline, "compute") == [("a", 0, 2), ("x", 2, 3)]


SECONDS = st.fractions(0, 20, max_denominator=8)
RATES = st.fractions(F(1, 8), 1, max_denominator=8)


@st.composite
def programs(draw):
    """Work, starts on up to three channels, waits for what was started."""
    program, started = [], []
    for index in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(("work", "work", "start", "wait") if started else ("work", "start")))
        if kind == "work":
            program.append(Work(f"w{index}", draw(SECONDS)))
        elif kind == "start":
            program.append(Start(f"c{index}", draw(SECONDS), draw(st.integers(0, 2))))
            started.append(f"c{index}")
        else:
            program.append(Wait(draw(st.sampled_from(started))))
    return program


@any_speed
@given(programs(), RATES, RATES)
def test_every_timeline_is_one(program, compute_rate, network_rate):
    timeline = run(program, compute_rate=compute_rate, network_rate=network_rate)
    work = sum((task.seconds for task in program if isinstance(task, Work)), F(0))
    communication = sum((task.seconds for task in program if isinstance(task, Start)), F(0))
    assert max(work, communication) <= timeline.seconds <= work / compute_rate + communication / network_rate
    compute = timeline.track("compute")
    assert all(a.end == b.begin for a, b in zip(compute, compute[1:])), "compute or wait, without a gap"
    order = [task.name for task in program if isinstance(task, Work) and task.seconds]
    assert [event.name for event in compute if event.kind != "wait"] == order
    for channel in range(3):
        sent = [event for event in timeline.track("communication") if event.channel == channel]
        assert all(a.end <= b.begin for a, b in zip(sent, sent[1:])), "one at a time"
        issued = [task.name for task in program if isinstance(task, Start) and task.channel == channel]
        assert sorted(event.name for event in sent) == sorted(issued)
        ends = {event.name: event.end for event in sent}
        assert [ends[name] for name in issued] == sorted(ends.values()), "in the order of starting"


def test_the_picture_shows_two_tracks():
    timeline = run([Work("f", 2, "forward"), Work("b", 2, "backward"), Start("bucket 0", 2), Work("b2", 1, "backward"),
                    Start("bucket 11", 1), Wait("bucket 0"), Wait("bucket 11"), Work("w", 1, "write"),
                    Work("o", 1, "optimizer")])
    assert timeline.picture(width=9) == ("compute       ░░███··=▒\n"
                                         "communication     001")
    assert timeline.picture(width=18, seconds=18) == timeline.picture(width=9)
    assert all(mark in LEGEND for mark in "░█·=▒")
