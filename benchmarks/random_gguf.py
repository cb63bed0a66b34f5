"""A GGUF file with random weights and the shape of a known model, for engines that are compared on their speed.

``python -m benchmarks.random_gguf FILE --shape tinyllama --weights int4``; see README.md beside this file.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, TokenType
from gguf.constants import GGML_QUANT_SIZES, GGML_QUANT_VERSION

from benchmarks.peer_processes import KINDS, add_field
from speccompile.cli.session import session
from speccompile.errors import InvalidOption
from speccompile.pretrained import smollm2_gguf


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. ``architecture`` is llama.cpp's name; queries and keys of ``qwen3`` have norms."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    rope_base: float
    tied: bool

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each matrix."""
        of_layer = {
            "attn_q": (self.heads * self.head_size, self.hidden),
            "attn_k": (self.kv_heads * self.head_size, self.hidden),
            "attn_v": (self.kv_heads * self.head_size, self.hidden),
            "attn_output": (self.hidden, self.heads * self.head_size),
            "ffn_gate": (self.intermediate, self.hidden),
            "ffn_up": (self.intermediate, self.hidden),
            "ffn_down": (self.hidden, self.intermediate),
        }
        tables = ("token_embd.weight", *["output.weight"] * (not self.tied))
        found = {name: (self.vocabulary, self.hidden) for name in tables}
        layers = range(self.layers)
        return found | {f"blk.{i}.{name}.weight": size for i in layers for name, size in of_layer.items()}

    def norms(self) -> dict[str, int]:
        """The size of each norm."""
        of_layer = {"attn_norm": self.hidden, "ffn_norm": self.hidden}
        if self.architecture == "qwen3":
            of_layer |= {"attn_q_norm": self.head_size, "attn_k_norm": self.head_size}
        found = {f"blk.{i}.{name}.weight": size for i in range(self.layers) for name, size in of_layer.items()}
        return {"output_norm.weight": self.hidden, **found}


#: Sources: config.json of TinyLlama/TinyLlama-1.1B-Chat-v1.0 and of Qwen/Qwen3-4B.
SHAPES = {
    "tinyllama": Shape("llama", 22, 2048, 5632, 32, 4, 64, 32000, 2048, 1e4, tied=False),
    "qwen3-4b": Shape("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e6, tied=True),
}
#: The standard deviation of a weight.
DEVIATION = 0.02


def random_blocks(size: tuple[int, int], kind: GGMLQuantizationType, generator: np.random.Generator) -> np.ndarray:
    """A matrix in Q4_0 or Q8_0, as the bytes of a GGUF file: a scale in half precision, and then 32 integers."""
    block, stored = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (size[0], size[1] // block, stored), dtype=np.uint8)
    # The deviation of integers that are drawn evenly.
    spread = (16 if kind == GGMLQuantizationType.Q4_0 else 256) / 12**0.5
    blocks[..., :2] = np.frombuffer(np.float16(DEVIATION / spread).tobytes(), dtype=np.uint8)
    return blocks.reshape(size[0], -1)


def write(path: Path, shape: Shape, layers_in: GGMLQuantizationType) -> None:
    """Matrices of layers in that type, embedding and lm_head in Q8_0. The vocabulary is that of SmolLM2, cut off or
    filled with unused tokens."""
    writer = GGUFWriter(path, shape.architecture)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{layers_in.name}"])
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    _add_tokenizer(writer, shape.vocabulary)
    generator = np.random.default_rng(0)
    for name, size in shape.matrices().items():
        kind = layers_in if name.startswith("blk.") else GGMLQuantizationType.Q8_0
        writer.add_tensor(name, random_blocks(size, kind, generator), raw_dtype=kind)
    for name, length in shape.norms().items():
        writer.add_tensor(name, np.ones(length, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, vocabulary: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fields = GGUFReader(smollm2_gguf(Path(folder))).fields
        values = {name: item.contents() for name, item in fields.items() if name.startswith("tokenizer.")}
        tokens = values["tokenizer.ggml.tokens"]
        unused = [f"<unused {number}>" for number in range(len(tokens), vocabulary)]
        types = [*values["tokenizer.ggml.token_type"], *[int(TokenType.UNUSED)] * len(unused)]
        values["tokenizer.ggml.tokens"] = [*tokens, *unused][:vocabulary]
        values["tokenizer.ggml.token_type"] = types[:vocabulary]
        known = set(values["tokenizer.ggml.tokens"])
        # The token of a merge is its two halves, which a space separates.
        merges = values["tokenizer.ggml.merges"]
        values["tokenizer.ggml.merges"] = [merge for merge in merges if merge.replace(" ", "", 1) in known]
        for name, value in values.items():
            add_field(writer, fields[name], value)


def main(
    path: Annotated[Path, typer.Argument(help="Where to write it.")],
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "tinyllama",
    weights: Annotated[str, typer.Option(help="int4 (Q4_0) or int8 (Q8_0).")] = "int4",
) -> None:
    """Write the file."""
    with session():
        if shape not in SHAPES:
            reason = f"choose from {', '.join(SHAPES)}"
            raise InvalidOption(where="the command line", name="--shape", value=shape, reason=reason)
        write(path, SHAPES[shape], KINDS[weights])


if __name__ == "__main__":
    typer.run(main)
