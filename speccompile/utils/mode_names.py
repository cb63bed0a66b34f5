"""Names of this package's modes. This module imports neither torch nor the modes."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

#: Name of the choice among all modes.
AUTO = "auto"
#: Class of each mode by name, as ``pkgutil.resolve_name`` accepts it.
CLASSES = {
    "dflash": "speccompile.modes.dflash.mode:DFlash",
    "draft_target": "speccompile.modes.draft_target:DraftTarget",
    "eagle": "speccompile.modes.eagle.mode:Eagle",
    "eagle3": "speccompile.modes.eagle3.mode:Eagle3",
    "eagle3_one_model": "speccompile.modes.eagle3.mode:Eagle3OneModel",
    "early_exit": "speccompile.modes.early_exit:EarlyExit",
    "gemma4_assistant": "speccompile.modes.gemma4_assistant.mode:Gemma4Assistant",
    "hydra": "speccompile.modes.hydra:Hydra",
    "medusa": "speccompile.modes.medusa:Medusa",
    "mlp_speculator": "speccompile.modes.mlp_speculator:MlpSpeculatorMode",
    "mtp": "speccompile.modes.mtp.mode:Mtp",
    "mtp_eagle": "speccompile.modes.mtp.eagle_mode:MtpEagle",
    "mtp_eagle_one_model": "speccompile.modes.mtp.eagle_mode:MtpEagleOneModel",
    "ngram": "speccompile.modes.ngram:NGram",
    "none": "speccompile.modes.none:NoSpeculation",
    "prediction": "speccompile.modes.prediction:Prediction",
    "recycle": "speccompile.modes.recycle:Recycle",
    "save_hidden_states": "speccompile.modes.save_hidden_states:SaveHiddenStatesMode",
    "suffix": "speccompile.modes.suffix:Suffix",
    "user_provided": "speccompile.modes.user_provided:UserProvided",
}


def installed_modes() -> dict[str, EntryPoint]:
    """Modes of installed packages by name."""
    return {point.name.lower(): point for point in entry_points(group="speccompile.modes")}
