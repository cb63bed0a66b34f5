"""Draft heads: small networks that read the target's hidden states and draft for it."""

from speccompile.modes.dflash.checkpoints import load_dflash, save_dflash
from speccompile.modes.dflash.config import DFlashConfig
from speccompile.modes.dflash.head import DFlashHead
from speccompile.modes.eagle.checkpoints import load_eagle
from speccompile.modes.eagle.config import EagleConfig
from speccompile.modes.eagle.head import EagleHead
from speccompile.modes.eagle3.checkpoints import load_eagle3
from speccompile.modes.eagle3.config import Eagle3Config
from speccompile.modes.eagle3.head import Eagle3Head
from speccompile.modes.eagle3.save import save_eagle3
from speccompile.modes.gemma4_assistant.checkpoints import load_gemma4_assistant
from speccompile.modes.gemma4_assistant.head import Gemma4AssistantHead
from speccompile.modes.hydra import HydraHeads, load_hydra
from speccompile.modes.medusa import MedusaHeads, load_medusa
from speccompile.modes.mlp_speculator import MlpSpeculator, load_mlp_speculator
from speccompile.modes.mtp.checkpoints import load_mtp
from speccompile.modes.mtp.head import MtpHead
from speccompile.modes.mtp.save import save_mtp
from speccompile.modes.mtp.variants import MtpVariant
from speccompile.passes.step.tap_hidden import default_taps

__all__ = [
    "DFlashConfig",
    "DFlashHead",
    "Eagle3Config",
    "Eagle3Head",
    "EagleConfig",
    "EagleHead",
    "Gemma4AssistantHead",
    "HydraHeads",
    "MedusaHeads",
    "MlpSpeculator",
    "MtpHead",
    "MtpVariant",
    "default_taps",
    "load_dflash",
    "load_eagle",
    "load_eagle3",
    "load_gemma4_assistant",
    "load_hydra",
    "load_medusa",
    "load_mlp_speculator",
    "load_mtp",
    "save_dflash",
    "save_eagle3",
    "save_mtp",
]
