"""Policies without a model: replay recorded or synthetic traces with any policy and any costs."""

from speccompile.runtime.trace import Recorder
from speccompile.runtime.trace_reader import RecordedRun, read_trace
from speccompile.tools.policy_lab.simulate import SimulatedRun, simulate
from speccompile.tools.policy_lab.synthetic import TRACES, synthetic_texts

__all__ = ["TRACES", "RecordedRun", "Recorder", "SimulatedRun", "read_trace", "simulate", "synthetic_texts"]
