"""Policies without a model: record what a run did, or make records up, and replay them against any policy and costs."""

from speccompile.policy_lab.made import TRACES, made_texts
from speccompile.policy_lab.simulate import Outcome, simulate
from speccompile.policy_lab.trace import Recorder, Trace, read_trace

__all__ = ["TRACES", "Outcome", "Recorder", "Trace", "made_texts", "read_trace", "simulate"]
