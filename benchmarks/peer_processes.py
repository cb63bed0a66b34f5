"""Other engines as variants of a comparison: each in its own process, reading one GGUF file."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, ReaderField
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from speccompile.cli.measure import TokenTimer, Variant
from speccompile.pretrained import smollm2_gguf

WORKER = Path(__file__).with_name("peer_worker.py")
#: What a line is called, by the form of the weights and the name that the worker has for it.
PEERS = {
    "int8": {"llama.cpp": "llama.cpp Q8_0", "openvino": "OpenVINO int8"},
    "int4": {"llama.cpp": "llama.cpp Q4_0", "openvino": "OpenVINO int4"},
}
#: What layers' matrices are written as. Embedding and lm_head are Q8_0.
KINDS = {"int8": GGMLQuantizationType.Q8_0, "int4": GGMLQuantizationType.Q4_0}
NOT_INSTALLED = "not installed"
#: The name that the worker has for KV in 8 bits.
EIGHT_BITS = "q8_0"
#: Peers whose KV has a form to choose.
CHOOSES_KV = ("llama.cpp",)


def drafted(name: str) -> str:
    """What the line of a peer that drafts is called."""
    return f"{name}, lookup"


class Peer:
    """An engine that answers requests in its own process.

    ``installed`` is its package and version, or None where that Python does not have it.

    Args:
        draft_len: most tokens that its own prompt lookup drafts; 0 for none.
        max_len: most tokens of a text.
        kv: the form of its KV; empty for its default.
    """

    def __init__(
        self,
        name: str,
        python: str,
        model: Path,
        threads: int,
        form: str,
        draft_len: int = 0,
        max_len: int = 4096,
        kv: str = "",
    ) -> None:
        self.name = drafted(PEERS[form][name]) if draft_len else PEERS[form][name]
        if kv:
            self.name += f", KV {kv}"
        self._said = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 -- lives as long as the process
        self._process = subprocess.Popen(
            [python, str(WORKER), name, str(model), str(threads), str(draft_len), str(max_len), kv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        self.installed: str | None = self._answer().get("ready")

    def variant(self, eos: list[int]) -> Variant:
        """It decodes greedily; ``eos`` ends a text."""

        def generate(ids: torch.Tensor, new_tokens: int, clock: TokenTimer) -> torch.Tensor:
            assert self._process.stdin is not None
            request = {"ids": ids[0].tolist(), "new": new_tokens, "eos": eos}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
            clock.first_seconds = answer["first_seconds"]
            clock.passes, clock.emitted = answer["passes"], len(answer["tokens"]) - 1
            return torch.cat([ids, torch.tensor([answer["tokens"]], dtype=ids.dtype)], dim=1)

        return Variant(self.name, generate)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            end = " ".join(self._said.read().splitlines()[-5:])
            raise RuntimeError(f"{self.name} has ended without an answer: {end}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def peers(
    python: str,
    threads: int,
    form: str,
    draft_lens: Sequence[int],
    max_len: int,
    gguf: Path | None = None,
    kvs: Sequence[str] = ("",),
) -> Iterator[list[Peer]]:
    """All of them, each once for every draft length, and for every form of KV if it can be chosen.

    They read ``gguf``, or else the weights of SmolLM2 rounded to Q8_0, or with ``int4`` to Q4_0.
    """
    with tempfile.TemporaryDirectory(prefix="speccompile-peers-") as folder, contextlib.ExitStack() as stack:
        if gguf is None:
            gguf = Path(folder, f"SmolLM2-135M-Instruct.{KINDS[form].name}.gguf")
            write_rounded(smollm2_gguf(Path(folder)), gguf, KINDS[form])
        started = []
        for draft_len in draft_lens:
            for name in PEERS[form]:
                for kv in kvs if name in CHOOSES_KV else kvs[:1]:
                    started.append(Peer(name, python, gguf, threads, form, draft_len, max_len, kv))
                    stack.callback(started[-1].close)
        yield started


def eos_of(model: PreTrainedModel) -> list[int]:
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def add_field(writer: GGUFWriter, field: ReaderField, value: Any) -> None:
    """``value`` under the name and the type that ``field`` has in another file."""
    kind = field.types[0]
    inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, value, kind, sub_type=inner)


def write_rounded(source: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """The same model with its layers' matrices in ``kind`` (32 weights share a scale), embedding and lm_head in Q8_0
    (in float32 if ``kind`` is that), its vectors in float32."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, item in reader.fields.items():
        # The writer has its own architecture and header.
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        if name == "general.file_type":
            writer.add_file_type(
                LlamaFileType[f"{'ALL' if kind == GGMLQuantizationType.F32 else 'MOSTLY'}_{kind.name}"]
            )
            continue
        add_field(writer, item, item.contents())
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        in_layer = tensor.name.startswith("blk.")
        keeps = values.ndim == 1 or kind == GGMLQuantizationType.F32
        own = GGMLQuantizationType.F32 if keeps else kind if in_layer else GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
