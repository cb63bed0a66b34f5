"""Seconds of runs on a device that runs beside the host: reported when they have ended, and none too early."""

from __future__ import annotations

import pytest
import torch

from speccompile.runtime.timing import EventClock, HostClock, clock_of


class Device:
    """Runs what was launched when it may go on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue: list[tuple[FakeEvent | None, float]] = []
        self.events = 0

    def event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self)

    def launch(self, seconds: float) -> None:
        self.queue.append((None, seconds))

    def go_on(self, count: int) -> None:
        for _ in range(count):
            event, seconds = self.queue.pop(0)
            self.now += seconds
            if event is not None:
                event.at = self.now


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: float | None = None

    def record(self) -> None:
        self.at = None
        self.device.queue.append((self, 0.0))

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at is not None and end.at is not None
        return 1e3 * (end.at - self.at)


def test_a_device_that_runs_beside_the_host() -> None:
    device, measured = Device(), []
    clock = EventClock(device.event)

    def run(seconds: float) -> None:
        with clock.time(measured.append):
            device.launch(seconds)

    run(0.5)
    run(0.25)
    device.launch(7.0)
    assert measured == []
    # The first has ended, and the second is on.
    device.go_on(5)
    run(0.125)
    assert measured == [0.5]
    device.go_on(5)
    run(2.0)
    # What was launched between two timed runs belongs to neither.
    assert measured == pytest.approx([0.5, 0.25, 0.125])
    made = device.events
    for _ in range(20):
        device.go_on(len(device.queue))
        run(1.0)
    assert device.events == made and len(measured) == 23


def test_a_host_tells_at_once() -> None:
    clock, measured = clock_of(torch.device("cpu")), []
    assert isinstance(clock, HostClock)
    with clock.time(measured.append):
        assert measured == []
    assert len(measured) == 1 and measured[0] >= 0


def test_a_run_that_fails_is_not_counted() -> None:
    device, measured = Device(), []
    for clock in (HostClock(), EventClock(device.event)):
        with pytest.raises(OSError), clock.time(measured.append):
            raise OSError
    device.go_on(len(device.queue))
    with clock.time(measured.append):
        pass
    assert measured == []
