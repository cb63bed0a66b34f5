"""Tolerances that several forms of one op share."""

#: A sum of probabilities reaches p if it is at most this much below p: four units in the last place of a float32 below
#: 1. Sums of float32 probabilities are off by about one such unit, so without it one token too many stays at every
#: fifth border where the exact sum equals p.
ROUNDING = 2.0**-22
