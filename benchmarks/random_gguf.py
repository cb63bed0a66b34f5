"""A GGUF file with random weights and the shape of TinyLlama-1.1B, for engines that are compared on their speed.

``python -m benchmarks.random_gguf FILE --weights int4``; see README.md beside this file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.constants import GGML_QUANT_SIZES, GGML_QUANT_VERSION

from benchmarks.peer_processes import KINDS, add_field
from speccompile.cli.session import session
from speccompile.pretrained import smollm2_gguf

#: The sizes of TinyLlama-1.1B. Source: config.json of TinyLlama/TinyLlama-1.1B-Chat-v1.0.
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY, CONTEXT = 22, 2048, 5632, 32, 4, 32000, 2048
#: The standard deviation of a weight.
DEVIATION = 0.02


def matrices() -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each matrix."""
    kv = HIDDEN // HEADS * KV_HEADS
    of_layer = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INTERMEDIATE, HIDDEN),
        "ffn_up": (INTERMEDIATE, HIDDEN),
        "ffn_down": (HIDDEN, INTERMEDIATE),
    }
    found = {name: (VOCABULARY, HIDDEN) for name in ("token_embd.weight", "output.weight")}
    return found | {f"blk.{i}.{name}.weight": size for i in range(LAYERS) for name, size in of_layer.items()}


def random_blocks(size: tuple[int, int], kind: GGMLQuantizationType, generator: np.random.Generator) -> np.ndarray:
    """A matrix in Q4_0 or Q8_0, as the bytes of a GGUF file: a scale in half precision, and then 32 integers."""
    block, stored = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (size[0], size[1] // block, stored), dtype=np.uint8)
    # The deviation of integers that are drawn evenly.
    spread = (16 if kind == GGMLQuantizationType.Q4_0 else 256) / 12**0.5
    blocks[..., :2] = np.frombuffer(np.float16(DEVIATION / spread).tobytes(), dtype=np.uint8)
    return blocks.reshape(size[0], -1)


def write(path: Path, layers_in: GGMLQuantizationType) -> None:
    """Matrices of layers in that type, embedding and lm_head in Q8_0. The vocabulary is the first tokens of SmolLM2."""
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType[f"MOSTLY_{layers_in.name}"])
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    _add_tokenizer(writer)
    generator = np.random.default_rng(0)
    for name, size in matrices().items():
        kind = layers_in if name.startswith("blk.") else GGMLQuantizationType.Q8_0
        writer.add_tensor(name, random_blocks(size, kind, generator), raw_dtype=kind)
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(LAYERS) for name in ("attn_norm", "ffn_norm"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fields = GGUFReader(smollm2_gguf(Path(folder))).fields
        values = {name: item.contents() for name, item in fields.items() if name.startswith("tokenizer.")}
        for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            values[name] = values[name][:VOCABULARY]
        known = set(values["tokenizer.ggml.tokens"])
        # The token of a merge is its two halves, which a space separates.
        merges = values["tokenizer.ggml.merges"]
        values["tokenizer.ggml.merges"] = [merge for merge in merges if merge.replace(" ", "", 1) in known]
        for name, value in values.items():
            add_field(writer, fields[name], value)


def main(
    path: Annotated[Path, typer.Argument(help="Where to write it.")],
    weights: Annotated[str, typer.Option(help="int4 (Q4_0) or int8 (Q8_0).")] = "int4",
) -> None:
    """Write the file."""
    with session():
        write(path, KINDS[weights])


if __name__ == "__main__":
    typer.run(main)
