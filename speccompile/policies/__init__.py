"""Policies, one file each, choose the draft length of each step. :mod:`speccompile.policies.base` has the interface."""

from speccompile.policies.base import (
    AnyPolicy,
    Chooser,
    Done,
    Ladder,
    LearningPolicy,
    Policy,
    Row,
    StoppingChooser,
    Upcoming,
    start,
)
from speccompile.policies.cost import Cost
from speccompile.policies.costs import CostTable, RunningCosts, TierCost
from speccompile.policies.default import default_policy
from speccompile.policies.ema import Ema
from speccompile.policies.fixed import Fixed
from speccompile.policies.gate import Gate
from speccompile.policies.options import check_tier
from speccompile.policies.parse import parse_policy, read_policy
from speccompile.policies.schedule import Schedule, ScheduleUpTo

__all__ = [
    "AnyPolicy",
    "Chooser",
    "Cost",
    "CostTable",
    "Done",
    "Ema",
    "Fixed",
    "Gate",
    "Ladder",
    "LearningPolicy",
    "Policy",
    "Row",
    "RunningCosts",
    "Schedule",
    "ScheduleUpTo",
    "StoppingChooser",
    "TierCost",
    "Upcoming",
    "check_tier",
    "default_policy",
    "parse_policy",
    "read_policy",
    "start",
]
