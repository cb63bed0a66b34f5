"""Every failure a user can cause, one class each: what happened, and what to do about it."""

from __future__ import annotations

import reprlib
import string
import sys
from typing import Any, ClassVar

#: Characters of a value that a message shows: a list of hundreds of token ids would hide the reason after it.
LONGEST_VALUE = 200


class _Brief(reprlib.Repr):
    """``repr``, but of tensors and modules their kind alone: a module prints its whole tree, a tensor its values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = LONGEST_VALUE
        self.maxstring = self.maxother = self.maxlong = 10 * LONGEST_VALUE

    def repr1(self, x: Any, level: int) -> str:
        # Without torch there are no tensors, and a command line that only has an error to print need not load it.
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(x, torch.nn.Module):
            return f"<{type(x).__name__}>"
        if torch is not None and isinstance(x, torch.Tensor):
            return f"<{type(x).__name__} {x.dtype} {list(x.shape)}>"
        return super().repr1(x, level)

    def repr_int(self, x: int, level: int) -> str:
        # Python raises for an int of thousands of digits.
        return super().repr_int(x, level) if x.bit_length() <= 4 * LONGEST_VALUE else f"<int of {x.bit_length()} bits>"


_BRIEF = _Brief()


def shown(value: Any) -> str:
    """``repr(value)`` as far as a message has room for it."""
    text = _BRIEF.repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


class _Formatter(string.Formatter):
    """``str.format`` whose ``!r`` is :func:`shown`."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return shown(value) if conversion == "r" else super().convert_field(value, conversion)


_FORMATTER = _Formatter()


class SpecCompileError(Exception):
    """Base of all errors of this package. ``template`` is filled with the keyword arguments."""

    template: ClassVar[str] = "{message}"

    def __init__(self, message: str | None = None, **fields: Any) -> None:
        self.fields = fields
        super().__init__(_FORMATTER.format(self.template, **fields) if message is None else message)


def error_line(error: Exception) -> str:
    """Kind and first two lines of another library's error (torch may add a whole graph), to be part of a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".rstrip(".!: ")


class UserError(SpecCompileError, ValueError):
    """The caller asked for something that cannot be had; the arguments have to change."""


# --- arguments of wrap -------------------------------------------------------------------------


class UnknownMode(UserError):
    """No mode is registered under that name."""

    template = (
        "unknown mode {name!r}. Available: {available}. "
        "A mode of your own is made known with speccompile.register_mode(name, cls)."
    )


class DuplicateMode(UserError):
    """A mode is registered under a name that is taken."""

    template = "mode {name!r} is already registered by {owner}; choose another name or pass replace=True."


class UnknownOption(UserError):
    """A keyword is not an option of what it is given to."""

    template = "{where} does not take {names}. It takes: {known}."


class OptionOfAnotherMode(UnknownOption):
    """An option belongs to another mode than the one that was chosen."""

    template = UnknownOption.template + " {modes}."


class InvalidOption(UserError):
    """An option has a value that is not valid."""

    template = "{where}: {name}={value!r} is not valid: {reason}."


class InvalidHead(UserError):
    """A draft head does not fit the target, or is not ready to draft."""

    template = "the draft head {source} cannot be used: {reason}."


class HeadKeys(UserError):
    """A head's checkpoint is not of a layout that is known. ``problems`` lists every key that is in the way."""

    template = (
        "the draft head {source} cannot be loaded, since its tensors are not those its config asks for:{problems}"
    )


class InvalidTiers(UserError):
    """``tiers`` of ``wrap`` are not valid."""

    template = (
        "tiers={tiers!r} is not valid: {reason}. Give distinct draft lengths that include 0 "
        "(the plain decoder), for example tiers=(0, 1, 3, 7)."
    )


class UnknownTier(UserError):
    """A draft length is chosen that was not built."""

    template = "no tier with draft length {tier!r} was built; built: {built}. Add it to tiers=... of wrap."


class InvalidPolicy(UserError):
    """A policy cannot be read, or names a tier that is not built."""

    template = (
        "policy={policy!r} is not valid: {reason}. Use 'fixed:K' (for example 'fixed:7'), "
        "'schedule:ROWS=K,...' (from so many live rows on, for example 'schedule:1=7,4=3,8=0', or up to so many: "
        "'schedule:<=4=7,<=8=3'), 'cost', 'ema' or 'gate' (with options: "
        "'ema:alpha=0.3,candidates=0/3/7'), or an object with choose(live_rows) -> K."
    )


class InvalidTrace(UserError):
    """A recorded trace cannot be replayed."""

    template = "{path} cannot be replayed: {reason}. spec.record_trace(path) writes one."


class UnknownBackend(UserError):
    """No backend is registered under that name."""

    template = "unknown backend {name!r}. Available: {available}."


class NeedsCuda(UserError):
    """A backend for CUDA is given a model on another device."""

    template = (
        "backend={name!r} needs a model on a CUDA device, and this one is on {device}. Move it with model.to('cuda'), "
        "or use backend='auto'."
    )


class UnknownAcceptance(UserError):
    """An acceptance rule has no such name."""

    template = "unknown acceptance rule {name!r}. Available: {available}."


class UnsupportedProcessor(UserError):
    """A logits processor cannot become part of a step."""

    template = (
        "logits_processor {name} cannot become part of a step: {reason}. {advice}. A processor that is passed to a "
        "request, spec.generate(..., logits_processor=...) or submit, may be any Python code: it is called on the host "
        "before each token, and that request has no drafts."
    )


class ConsumeUnavailable(UserError):
    """``consume=True`` cannot keep one copy of the weights here."""

    template = "consume=True cannot be kept: {reason}. Use consume=False{advice}."


class InvalidCalibration(UserError):
    """A calibration is damaged, or is not one of this model."""

    template = (
        "the calibration {source!r} cannot be used: {reason}. Make one of this model with speccompile.calibrate, or "
        "`speccompile calibrate`."
    )


class DeterministicUnavailable(SpecCompileError):
    """``deterministic=True`` does not hold; ``op`` is the first op whose bits differ."""

    template = (
        "deterministic=True cannot be kept: {evidence}. First op whose rows depend on where they stand: "
        "{op}. Use deterministic=False, or a backend whose ops have a fixed order of reduction."
    )


# --- packages ----------------------------------------------------------------------------------


class CannotSave(UserError):
    """Something that was given to ``wrap`` cannot be part of a package."""

    template = "{name} cannot be saved into a package: {reason}. Call wrap with it instead of load."


class CorruptPackage(SpecCompileError):
    """A package cannot be read."""

    template = "{path} is not a complete package: {what}. Copy it anew, or write it again with spec.save(path)."


class ForeignPackage(SpecCompileError):
    """A package was saved for another model, for another machine, or by other versions."""

    template = "{path} does not fit: {what} was {theirs!r} where it was saved, and is {ours!r} here. {advice}."


# --- the model ---------------------------------------------------------------------------------


class UnsupportedModel(UserError):
    """The model cannot be captured; ``reason`` names the module and why."""

    template = "{model} cannot be captured: {reason}."


class CannotBeTiny(SpecCompileError):
    """``speccompile families`` cannot make a tiny model of a family."""

    template = "no tiny {family} can be made: {reason}."


class UnknownFamily(UserError):
    """transformers has no such model family."""

    template = "transformers {version} has no causal-LM family {names}. {advice}"


class ModelInTraining(UserError):
    """The model is in training mode."""

    template = "{model} is in training mode (dropout would change the text). Call model.eval() first."


class ModelConsumed(UserError):
    """The plain weights are needed of a model whose weights a wrap has packed."""

    template = (
        "the weights of this model were packed by wrap (consume=True, or weights of a quantised checkpoint), and no "
        "other copy exists: {what}. Load the model again."
    )


class ModelOnSeveralDevices(UserError):
    """The model's weights are on more than one device."""

    template = (
        "{model} lies on several devices ({devices}). Load it on one, for example with "
        "device_map={{'': {first!r}}}, or call model.to({first!r})."
    )


class UnsupportedDtype(UserError):
    """The model's weights have a dtype that is not supported on its device."""

    template = "{model} has weights in {dtypes}. Supported on {device}: {supported}, one for all. {advice}"


class CaptureError(SpecCompileError):
    """The model could not be turned into a step graph."""


class AnchorError(CaptureError):
    """A part of the model that passes refer to, such as the lm_head, is not found in the captured graph."""

    template = "cannot find {anchor} in the captured graph: {reason}."


class CaptureMismatch(CaptureError):
    """``fields`` hold ``difference``, ``allowed`` (both in logits) and ``where``; of a model that does not take them
    also ``missing="position_ids"``."""

    template = (
        "the captured graph does not compute what {model} computes: largest logit difference "
        "{difference:.3g} (allowed {allowed:.3g}) {where}. Its text would change, so this model is refused."
    )


# --- quantised checkpoints ---------------------------------------------------------------------


class UnsupportedCheckpoint(UserError):
    """The quantised weights of a checkpoint are of a format, or have a property, that cannot be read exactly."""

    template = "the quantised weights of {source} cannot be read exactly: {reason}. {advice}."


class DamagedCheckpoint(SpecCompileError):
    """A quantised checkpoint is cut off, or its parts do not fit one another."""

    template = "{source} is damaged or incomplete: {reason}. Download it again, or write it again."


# --- passes ------------------------------------------------------------------------------------


class PassError(SpecCompileError):
    """A pass, or the order of the passes, is wrong."""


class MissingFact(PassError):
    """A pass requires a fact that no pass provides."""

    template = (
        "{consumer} needs the fact {fact!r}, and nothing provides it. Provided here: {provided}. "
        "Add a pass that provides {fact!r}."
    )


class InvalidatedFact(MissingFact):
    """A pass requires a fact that a pass before it invalidates."""

    template = (
        "{consumer} needs the fact {fact!r}, which pass {by!r} invalidates before it. Move {by!r} after it, or let "
        "{by!r} provide {fact!r} anew."
    )


class PassOrderError(PassError):
    """A pass requires a fact that only a later pass provides."""

    template = (
        "pass {consumer!r} needs the fact {fact!r}, which pass {producer!r} provides later ({cycle}). "
        "Passes run in the order of their list: put {producer!r} before {consumer!r}."
    )


class NothingMatched(PassError):
    """A pass that is not optional found nothing to change."""

    template = (
        "pass {name!r} found nothing to change: it looked for {looked_for}. "
        "Remove the pass, or set optional = True if that is fine."
    )


class UnknownValue(PassError):
    """A pass reads a value of the graph that no pass before it has named."""

    template = "the graph has no value {name!r} here. Values here: {available}."


class PassFailed(PassError):
    """A pass of the user's own raised; ``reason`` is its own error."""

    template = "pass {name!r} of wrap(passes=...) failed: {reason}."


class VerifierError(PassError):
    """The graph is wrong after a pass: its form, its ports, a write, or a shape."""

    template = "after pass {name!r}: {problem}"


class UnknownStage(UserError):
    """A tier has no stage of that name."""

    template = "there is no stage {name!r} in {tier}. Stages: {available}."


class LoweringError(SpecCompileError):
    """A verified step graph could not be turned into an executable."""


class BackendFailed(LoweringError):
    """A backend raised while it lowered a step; ``reason`` is its own error."""

    template = "backend {name!r} could not {what}: {reason}."


class CannotCapture(LoweringError):
    """A step cannot become a CUDA graph; ``where`` is the op, and the line that called it."""

    template = (
        "{tier} cannot be captured as a CUDA graph: {where} ({reason}). A captured step may not wait for the host, "
        "copy from it, or make sizes of values: change that op, or take backend='inductor'."
    )


class CapturedElsewhere(LoweringError):
    """An op of a CUDA graph is called with a tensor that could be freed while the graph lives."""

    template = (
        "{tier} calls {op} with a tensor at {address}, which is neither a weight, nor in the arena, nor in the pool of "
        "its CUDA graphs: it could be freed under the graph. Make it a state tensor, or a port of the step."
    )


class StaleGraph(SpecCompileError):
    """A CUDA graph refers to a tensor that has another address now."""

    template = (
        "{tier} was captured with the {role} {name!r} at {then}, and it lies at {now} now: the graph would read what "
        "was there. Change it in place, or wrap the model again."
    )


# --- requests ----------------------------------------------------------------------------------


class EmptyPrompt(UserError):
    """A prompt has no token."""

    template = "prompt {row} is empty. Give at least one token (for example the BOS token)."


class PromptTooLong(UserError):
    """A prompt leaves no room for a new token."""

    template = (
        "prompt {row} has {length} tokens, but with max_len={max_len} a prompt can have at most "
        "{allowed}. Shorten it, or wrap with a larger max_len."
    )


class TokenOutOfVocabulary(UserError):
    """A prompt has a token id that the model does not know."""

    template = "prompt {row} holds the token id {token}, outside of 0 .. {last} (vocabulary of {vocab})."


class InvalidInput(UserError):
    """An input of a request has a wrong type, shape or value."""

    template = "{name} is not valid: {reason}."


class InvalidGuide(UserError):
    """A schema or a pattern cannot become a guide."""

    template = "the guide {what} cannot be followed: {reason}."


class InvalidAdapter(UserError):
    """A LoRA adapter cannot be read, or is none that the buffers have room for."""

    template = "the adapter {name!r} ({source}) cannot be added: {reason}."


class UnknownAdapter(UserError):
    """No adapter of that name is loaded."""

    template = "there is no adapter {name!r}; loaded: {loaded}. Add it with spec.add_adapter(name, folder)."


class AdapterRemoved(SpecCompileError):
    """The adapter of a request was removed before the request was queued. It ends that request."""

    template = (
        "the adapter {name!r} was removed before this request was queued, and another one has its place. Submit it "
        "again with an adapter that is loaded."
    )


class AdaptersFull(SpecCompileError):
    """Each place of an adapter is taken, by one that is loaded or by requests with one that was removed."""

    template = (
        "no place is free for the adapter {name!r}: of {count}, {loaded} are loaded, and requests that have not ended "
        "hold the others. Remove one with spec.remove_adapter(name), or wrap with Adapters(count={more})."
    )


class QueueFull(SpecCompileError):
    """More requests wait than ``max_waiting`` allows."""

    template = (
        "no room for {count} more: {waiting} requests wait, and max_waiting={limit}. Submit again later "
        "(engine.capacity().room tells when), or wrap with a larger max_waiting."
    )


class UndecidedLogits(SpecCompileError):
    """The model's logits are NaN, so that no token can be chosen. It ends that request."""

    template = (
        "no next token can be chosen after token {position} of the text: the model's logits are NaN, or all of them "
        "-inf (look for NaN or overflow in its weights, or load it in float32), or the request's own options, or the "
        "logits processors given to wrap, forbid every token."
    )


class DraftFailed(SpecCompileError):
    """A drafter on the host raised, or returned what is not a draft. It ends that request."""

    template = "the drafter given to wrap(mode='user_provided', host=True) failed: {reason}."


class RecordsNotWritten(SpecCompileError):
    """Hidden states cannot be written."""

    template = (
        "hidden states cannot be saved to {folder}: {reason}. What spec.hidden_states.written lists is safe; mend that "
        "and wrap again, and the other records are made anew."
    )


class CorruptRecords(SpecCompileError):
    """Saved hidden states cannot be read."""

    template = "{path} is not a complete file of records: {reason}. Delete it, and its records are made again."


class TextsNotWritten(SpecCompileError):
    """Training texts cannot be written."""

    template = (
        "training texts cannot be written to {folder}: {reason}. Those that were saved are safe; mend that, and the "
        "same call continues."
    )


class NoTexts(SpecCompileError):
    """None of many texts in a row that the target wrote could be kept; ``reasons`` counts why."""

    template = (
        "of {count} training texts in a row that the target wrote, none could be kept ({reasons}). A model that was "
        "not trained on chats does not write user turns: give prompts. Against duplicates raise the temperature."
    )


class CorruptTexts(SpecCompileError):
    """Saved training texts cannot be read."""

    template = (
        "{path} is not a whole file of training texts: {reason}. Delete it and the files after it, and make them again."
    )


class CorruptCheckpoint(SpecCompileError):
    """A training cannot continue from a checkpoint."""

    template = "{path} cannot be continued from: {reason}. {advice}; or give another output folder."


class TrainingNotSaved(SpecCompileError):
    """A checkpoint or a trained head cannot be written."""

    template = (
        "the training cannot write to {folder}: {reason}. Checkpoints that are complete are safe; mend that, and the "
        "same call continues."
    )


class TrainingDiverged(SpecCompileError):
    """The loss of a training is not a number any more."""

    template = (
        "the loss became {loss} in step {step} of the training, at a learning rate of {rate}. Use a lower "
        "learning_rate, or precision='float32', with another output folder."
    )


class RequestFailed(SpecCompileError):
    """A request ended with the error of something that it called, such as a streamer."""

    template = "the request ended with its own error: {reason}."


class InsideStep(SpecCompileError):
    """A callback that runs inside of a step calls what waits for that step."""

    template = (
        "{what} was called in a callback (a streamer, a stopping criterion), which runs inside of a step that it would "
        "wait for. A callback may submit and cancel; wait in another thread."
    )


class CannotMove(UserError):
    """A wrapped model was moved to another device or dtype."""

    template = (
        "a wrapped model cannot be moved to {wanted}: its steps are built for {device} and {dtype}. Move the model and "
        "call speccompile.wrap again; or give device=spec.device to what moves it (transformers.pipeline)."
    )


class PlaceholderToken(UserError):
    """A prompt has a token that stands for an image, a video or audio."""

    template = (
        "prompt token {position} is {token}, the model's {name}: it only stands for input that is not text, and steps "
        "embed text alone. Leave such tokens out, or call the model's own generate with that input."
    )


class TooManyEosTokens(UserError):
    """A request has more end-of-text ids than a slot holds."""

    template = "{count} EOS ids, but a slot has room for {capacity}."


class ModelChanged(SpecCompileError):
    """The model is not what was captured. ``fields["what"]`` names the difference and its module."""

    template = (
        "{model} changed after wrap, and the compiled steps do not follow: {what}. Undo that, or call spec.rebuild(), "
        "which builds for the model as it is now."
    )


class WeightsReplaced(ModelChanged):
    """A weight is another tensor than when the model was wrapped."""

    template = (
        "{path} of the model is another tensor than when it was wrapped, so its text would be the old model's. "
        "Call spec.rebuild(), or wrap again (changing weights in place is fine)."
    )


class ForkedSpeculator(SpecCompileError):
    """A child process uses a speculator whose state it cannot share with its parent."""

    template = (
        "this process was forked from the one that wrapped the model, and the speculator cannot be used here: "
        "{reason}. Call wrap in this process, or start it with multiprocessing.get_context('spawn')."
    )


class CannotCopy(UserError):
    """A speculator or an engine was copied or pickled."""

    template = (
        "a speculator and its engine cannot be copied or pickled: their state and executables belong to one process. "
        "Write the speculator with spec.save(path), and call speccompile.load(path, model) where the copy is needed."
    )


# --- ranks ---------------------------------------------------------------------------------------


class RankError(SpecCompileError):
    """Base of what ends the common work of the ranks of a sharded model. Every rank raises one."""


class RankLost(RankError):
    """Another rank has ended, or did not take part in time."""

    template = (
        "the ranks of the sharded model lost one another in {during}: {reason}. Start all ranks again; a rank that is "
        "slow needs a larger wrap(rank_timeout=)."
    )


class RanksDiffer(RankError):
    """Ranks that have to be equal are not."""

    template = (
        "the ranks of the sharded model differ in {what}: {reason}. Nothing that was emitted since the last comparison "
        "can be relied on; start all ranks again, with the same versions, arguments and weights."
    )


class FollowerRank(UserError):
    """A rank that follows the first one was asked to decode."""

    template = (
        "rank {rank} follows rank 0, which alone accepts requests. Call spec.follow() here: it runs what rank 0 runs, "
        "and returns when rank 0 closes its speculator."
    )


class UnsupportedSharded(UserError):
    """A method that runs the model itself was called for a sharded one, whose other ranks would not take part."""

    template = "{what} is not available for a sharded model: {reason}."


class Closed(SpecCompileError):
    """A speculator or an engine is used after ``close``."""

    template = "this speculator was closed; wrap the model again."


class Rebuilt(Closed):
    """``spec.rebuild()`` closed the engine that a request was sent to, and cancelled its requests."""

    template = (
        "spec.rebuild() closed the engine and cancelled its requests. When rebuild has returned, send the request "
        "again, to spec or to the new spec.engine."
    )


class Degraded(UserWarning):
    """A wrap works with less than it could: slower, or again in every process. Says what is lost and what to do."""


class OutputTruncated(UserWarning):
    """A row ended at ``max_len`` before it had ``max_new_tokens`` tokens."""


class PretrainedError(SpecCompileError):
    """A model could not be fetched, found or loaded. ``fields`` hold its ``source`` (a name or a path) and the
    ``reason``."""
