"""Tolerances that several forms of one op share."""

#: A sum of probabilities reaches p if it is at most this much below p: four units in the last place of a float32 below
#: 1. Sums of float32 probabilities are off by about one such unit, so without it one token too many stays at every
#: fifth border where the exact sum equals p.
ROUNDING = 2.0**-22

#: Scores may be so much below the threshold of min-p: two units in the last place of a float32 between 16 and 32, as
#: logits are. Without it a token whose probability equals the share goes at every eighth such border, since scores are
#: rounded.
MIN_P_ROUNDING = 2.0**-18

#: :data:`ROUNDING` for typical-p: twice as much, since each of its probabilities is rounded separately. Without it
#: one token too many stays at every fourth border where the exact sum equals p.
TYPICAL_P_ROUNDING = 2.0**-21
