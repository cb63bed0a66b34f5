"""Inspection report: the compiled steps of a model, the cost of each step, and the value of its drafts."""
