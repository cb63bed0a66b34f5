"""Draft heads: small networks that read the target's hidden states and draft for it."""

from speccompile.heads.checkpoints import load_eagle3
from speccompile.heads.eagle3 import Eagle3Head
from speccompile.heads.eagle3_config import Eagle3Config, default_taps
from speccompile.heads.mtp import MtpHead
from speccompile.heads.mtp_checkpoints import load_mtp
from speccompile.heads.mtp_variants import MtpVariant

__all__ = ["Eagle3Config", "Eagle3Head", "MtpHead", "MtpVariant", "default_taps", "load_eagle3", "load_mtp"]
